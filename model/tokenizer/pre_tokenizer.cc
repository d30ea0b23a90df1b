#include "model/tokenizer/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/check.h"
#include "model/tokenizer/vocabulary.h"

namespace dovetail::model {
namespace {

struct PreTokenizerRow {
  PreTokenizer pre;
  std::string_view name;
  std::vector<std::string> patterns;  // spelled as in the models' tokenizer.json
};

const char kGpt2Pattern[] = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

const std::vector<PreTokenizerRow>& Rows() {
  static const auto* const rows = new std::vector<PreTokenizerRow>{
      {PreTokenizer::kNone, "none", {}},
      {PreTokenizer::kGpt2, "gpt-2", {kGpt2Pattern}},
      {PreTokenizer::kLlama3,
       "llama3",
       {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}},
      {PreTokenizer::kQwen2,
       "qwen2",
       {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}},
      {PreTokenizer::kQwen35,
       "qwen35",
       {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}},
      {PreTokenizer::kGpt4o,
       "gpt-4o",
       {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
        R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
        R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}},
      {PreTokenizer::kTekken,
       "tekken",
       {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
        R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
        R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}},
      {PreTokenizer::kDeepSeek3,
       "deepseek-v3",
       {R"(\p{N}{1,3})", "[一-龥぀-ゟ゠-ヿ]+",
        R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|)"
        R"( ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}},
      {PreTokenizer::kSmolLm, "smollm", {R"(\p{N})", kGpt2Pattern}},
  };
  return *rows;
}

const PreTokenizerRow& RowOf(PreTokenizer pre) {
  for (const PreTokenizerRow& row : Rows()) {
    if (row.pre == pre) return row;
  }
  DT_CHECK(false, "no such pre-tokenizer");
  return Rows().front();
}

struct GgufRow {
  std::string_view name;
  GgufPre implies;
};

constexpr GgufRow kGgufRows[] = {
    {"gpt-2", {PreTokenizer::kGpt2}},
    {"phi-2", {PreTokenizer::kGpt2}},
    {"llama3", {PreTokenizer::kLlama3, true, true}},
    {"llama-v3", {PreTokenizer::kLlama3, true, true}},
    {"llama-bpe", {PreTokenizer::kLlama3, true, true}},
    {"falcon3", {PreTokenizer::kLlama3, true, true}},
    {"pixtral", {PreTokenizer::kLlama3, true, true}},
    {"dbrx", {PreTokenizer::kLlama3}},       // Phi-4
    {"smaug-bpe", {PreTokenizer::kLlama3}},  // SmolLM3
    {"qwen2", {PreTokenizer::kQwen2, false, false, true}},
    {"deepseek-r1-qwen", {PreTokenizer::kQwen2, false, false, true}},
    {"qwen35", {PreTokenizer::kQwen35, false, false, true}},
    {"gpt-4o", {PreTokenizer::kGpt4o, true}},
    {"llama4", {PreTokenizer::kGpt4o, true}},
    {"tekken", {PreTokenizer::kTekken, true, true}},
    {"deepseek-v3", {PreTokenizer::kDeepSeek3}},
    {"smollm", {PreTokenizer::kSmolLm}},
};

// PCRE2's \s has U+180E, which has not been white space since Unicode 6.3; the models' own engine goes by the property.
std::string ForPcre2(const std::string& pattern) {
  return absl::StrReplaceAll(pattern, {{R"(\s)", R"(\p{White_Space})"}, {R"(\S)", R"(\P{White_Space})"}});
}

struct CodeDeleter {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct ContextDeleter {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};
struct MatchDeleter {
  void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
};
using Code = std::unique_ptr<pcre2_code, CodeDeleter>;

constexpr uint32_t kMatchLimit = 64u << 20;    // steps for one piece: several times what 1 MiB in one piece takes
constexpr uint32_t kDepthLimit = 1000;         // nested backtracking points; our expressions need a handful
constexpr uint32_t kHeapLimitKib = 32 * 1024;  // of the interpreter, where the JIT is not available

std::string ErrorText(int code) {
  PCRE2_UCHAR8 text[256];
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

}  // namespace

std::string_view Name(PreTokenizer pre) { return RowOf(pre).name; }

std::span<const std::string> PatternsOf(PreTokenizer pre) { return RowOf(pre).patterns; }

absl::StatusOr<GgufPre> PreTokenizerOfGguf(std::string_view name) {
  for (const GgufRow& row : kGgufRows) {
    if (row.name == name) return row.implies;
  }
  std::vector<std::string> known;
  for (const GgufRow& row : kGgufRows) known.emplace_back(row.name);
  return Unimplemented("tokenizer.ggml.pre: ", QuoteToken(name), " is not a pre-tokenizer we know (",
                       absl::StrJoin(known, ", "), "); use a model with one of these, or its Hugging Face folder");
}

absl::StatusOr<PreTokenizer> PreTokenizerOfPatterns(std::span<const std::string> patterns) {
  for (const PreTokenizerRow& row : Rows()) {
    if (!row.patterns.empty() &&
        std::equal(patterns.begin(), patterns.end(), row.patterns.begin(), row.patterns.end())) {
      return row.pre;
    }
  }
  std::vector<std::string> known;
  for (const PreTokenizerRow& row : Rows()) known.emplace_back(row.name);
  const std::string shown = patterns.empty() ? "no pattern" : QuoteToken(patterns.front());
  return Unimplemented("pre_tokenizer: ", patterns.size(), " split patterns beginning with ", shown,
                       " are not those of a pre-tokenizer we know (", absl::StrJoin(known, ", "), ")");
}

struct PieceSplitter::Impl {
  std::vector<Code> passes;
  std::unique_ptr<pcre2_match_context, ContextDeleter> context;  // read only after Create

  absl::Status SplitOne(const Code& code, pcre2_match_data* match, std::string_view text,
                        std::vector<std::string_view>& pieces) const;
};

PieceSplitter::PieceSplitter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PieceSplitter::PieceSplitter(PieceSplitter&&) noexcept = default;
PieceSplitter& PieceSplitter::operator=(PieceSplitter&&) noexcept = default;
PieceSplitter::~PieceSplitter() = default;

absl::StatusOr<PieceSplitter> PieceSplitter::Create(PreTokenizer pre) {
  auto impl = std::make_unique<Impl>();
  impl->context.reset(pcre2_match_context_create(nullptr));
  if (impl->context == nullptr) return ResourceExhausted("out of memory for the pre-tokenizer");
  pcre2_set_match_limit(impl->context.get(), kMatchLimit);
  pcre2_set_depth_limit(impl->context.get(), kDepthLimit);
  pcre2_set_heap_limit(impl->context.get(), kHeapLimitKib);
  for (const std::string& spelled : RowOf(pre).patterns) {
    const std::string pattern = ForPcre2(spelled);
    int error = 0;
    PCRE2_SIZE offset = 0;
    Code code(pcre2_compile(reinterpret_cast<PCRE2_SPTR8>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP,
                            &error, &offset, nullptr));
    if (code == nullptr)
      return Internal("pre-tokenizer ", std::string(Name(pre)), ": ", ErrorText(error), " at ", offset);
    // Without the JIT (no executable memory allowed) the interpreter gives the same matches.
    pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
    impl->passes.push_back(std::move(code));
  }
  return PieceSplitter(std::move(impl));
}

absl::Status PieceSplitter::Impl::SplitOne(const Code& code, pcre2_match_data* match, std::string_view text,
                                           std::vector<std::string_view>& pieces) const {
  const PCRE2_SIZE* const span = pcre2_get_ovector_pointer(match);
  size_t done = 0;
  while (done < text.size()) {
    const int rc = pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR8>(text.data()), text.size(), done,
                               PCRE2_NO_UTF_CHECK, match, context.get());
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0) return ResourceExhausted("the text is too irregular to tokenize: ", ErrorText(rc));
    DT_CHECK(span[1] > span[0] && span[0] >= done, "a pre-tokenizer matched nothing");
    if (span[0] > done)
      pieces.push_back(text.substr(done, span[0] - done));  // what no alternative covers stays a piece
    pieces.push_back(text.substr(span[0], span[1] - span[0]));
    done = span[1];
  }
  if (done < text.size()) pieces.push_back(text.substr(done));
  return absl::OkStatus();
}

absl::Status PieceSplitter::Split(std::string_view text, std::vector<std::string_view>& pieces) const {
  pieces.clear();
  if (text.empty()) return absl::OkStatus();
  pieces.push_back(text);
  if (impl_->passes.empty()) return absl::OkStatus();
  const std::unique_ptr<pcre2_match_data, MatchDeleter> match(pcre2_match_data_create(1, nullptr));
  if (match == nullptr) return ResourceExhausted("out of memory for the pre-tokenizer");
  std::vector<std::string_view> before;
  for (const Code& code : impl_->passes) {
    before.swap(pieces);
    pieces.clear();
    for (const std::string_view piece : before) DT_RETURN_IF_ERROR(impl_->SplitOne(code, match.get(), piece, pieces));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::model
