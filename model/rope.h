#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/ids.h"

// Rotary position embedding: what a model says about it, and the frequencies that follow.
// Source: Su et al. 2021; scalings as in Hugging Face transformers, modeling_rope_utils.py.
// Threads: pure.

namespace dovetail::model {

enum class RopeKind {
  kDefault,   // inv_freq_i = theta^(-2i/r)
  kLinear,    // inv_freq / factor
  kDynamic,   // NTK: theta grows with the length beyond max_positions
  kLlama3,    // long waves divided by factor, short ones kept, a ramp between
  kYarn,      // the same idea by dimension, and a multiplier on cos and sin
  kLongRope,  // one divisor per pair, other ones beyond original_max_positions (Phi-3)
};
std::string_view Name(RopeKind kind);  // as in config.json: "default", "llama3", ...

// Pairs are half-split: dimension i turns with dimension i + rotary_dims / 2 by position * inv_freq[i], for i <
// rotary_dims / 2; dimensions from rotary_dims on are left alone. GGUF's interleaved rows of Q and K are put back into
// this order at load (checkpoint.h).
struct RopeSpec {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000.0;
  int rotary_dims = 0;  // r: even, at most the head dimension
  double factor = 1.0;
  int64_t max_positions = 0;                             // m: the model's context; kDynamic grows beyond it
  int64_t original_max_positions = 0;                    // o: the context before it was stretched
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // kLlama3
  double beta_fast = 32.0, beta_slow = 1.0;              // kYarn
  bool truncate = true;                                  // kYarn: whole dimensions as the ramp's ends
  double attention_factor = 1.0;                         // cos and sin are multiplied by it
  std::vector<float> short_factor, long_factor;          // kLongRope: r / 2 each
  std::vector<float> divisors;  // r / 2, or empty: inv_freq_i is divided by it first (GGUF's rope_freqs.weight)

  bool operator==(const RopeSpec&) const = default;
};

// Frequencies of one sequence. cos and sin of pair i at position p: multiplier * cos(p * inv_freq[i]), the product in
// f32.
struct RopeTable {
  std::vector<float> inv_freq;  // r / 2
  float multiplier = 1.0f;
};

// kDynamic and kLongRope depend on how long the sequence is. Their reference recomputes every key at every length; here
// keys are stored rotated, so the length is fixed when a sequence is opened and stays with it for its life: through
// decoding, preemption, recovery and moves. The logits of the prompt then equal the reference's full pass of the
// prompt; tokens generated after it keep the prompt's frequencies, where the reference's full pass of n tokens takes
// n's. (transformers also remembers the longest length it has seen: a reference taken after a longer pass has that
// one's frequencies. The golden llama_dynamic is such a case: its step 0 and its hidden states are at length 77, its
// prompt logits at 108.) A caller may fix any other length.
enum class RopeLengthRule {
  kPrompt,        // the prompt's tokens (the default)
  kModelMaximum,  // the longest the model allows, the same for every sequence, as vLLM does: prefixes are shared by all
                  // lengths
};
int64_t RopeLength(const RopeSpec& spec, RopeLengthRule rule, int64_t prompt_tokens);

// The frequencies of a sequence whose fixed length is `length` >= 0. Computed in f32 in the order of transformers, so
// that they agree to the last bit or two.
RopeTable MakeRopeTable(const RopeSpec& spec, int64_t length);

// Sequences share frequencies, and therefore rotated keys, exactly if this number is equal: 0 for kinds that do not
// look at the length. It belongs into the salt of a prefix digest.
int64_t RopeVariant(const RopeSpec& spec, int64_t length);

// cos and sin (r / 2 each) of one position, as MakeRopeTable describes.
void RopeCosSin(const RopeTable& table, Position position, float* cos, float* sin);

// YaRN's multiplier 0.1 * mscale * ln(factor) + 1, and 1 for factor <= 1.
double YarnMscale(double factor, double mscale = 1.0);
// longrope's multiplier sqrt(1 + ln(factor) / ln(original_max_positions)), and 1 for factor <= 1.
double LongRopeMultiplier(double factor, int64_t original_max_positions);

}  // namespace dovetail::model
