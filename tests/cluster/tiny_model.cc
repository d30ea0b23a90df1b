#include "tests/cluster/tiny_model.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <random>

#include "base/check.h"
#include "base/dtype.h"
#include "kernels/quant_format.h"
#include "tests/model/gguf_builder.h"

namespace dovetail::test {
namespace {

using model::GgmlType;
using model::test::GgufBuilder;

class TinyModelWriter {
 public:
  explicit TinyModelWriter(const TinyModelSpec& spec) : spec_(spec), random_(spec.seed) {}

  std::string Build() {
    const std::string arch = spec_.architecture + ".";
    file_.Text("general.architecture", spec_.architecture);
    file_.U32(arch + "block_count", spec_.layers).U32(arch + "context_length", spec_.positions);
    file_.U32(arch + "embedding_length", spec_.hidden).U32(arch + "feed_forward_length", spec_.mlp);
    file_.U32(arch + "attention.head_count", spec_.heads).U32(arch + "attention.head_count_kv", spec_.kv_heads);
    file_.U32(arch + "attention.key_length", spec_.head_dim).U32(arch + "attention.value_length", spec_.head_dim);
    file_.F32(arch + "attention.layer_norm_rms_epsilon", 1e-6f);
    if (spec_.window > 0)
      file_.U32(arch + "attention.sliding_window", spec_.window).U32(arch + "attention.sliding_window_pattern", 2);
    Embedding();
    for (int layer = 0; layer < spec_.layers; ++layer) Layer("blk." + std::to_string(layer) + ".");
    Norm("output_norm", spec_.hidden);
    Weight("output", spec_.hidden, spec_.vocab, 2.0f);
    return file_.Build();
  }

 private:
  // Mean 0, variance 1, without the library's own (and thus varying) distributions.
  float Random() { return (static_cast<float>(random_() >> 40) / (1 << 24) - 0.5f) * std::sqrt(12.0f); }

  std::vector<float> Randoms(size_t count, float mean, float deviation) {
    std::vector<float> values(count);
    for (float& v : values) v = mean + deviation * Random();
    return values;
  }

  void Embedding() {
    file_.Tensor("token_embd.weight", {static_cast<uint64_t>(spec_.hidden), static_cast<uint64_t>(spec_.vocab)},
                 Randoms(size_t(spec_.hidden) * spec_.vocab, 0, 1));
  }

  void Norm(const std::string& name, int size) {
    file_.Tensor(name + ".weight", {static_cast<uint64_t>(size)}, Randoms(size, 1, 0.3f));
  }

  void Layer(const std::string& blk) {
    const int query = spec_.heads * spec_.head_dim, kv = spec_.kv_heads * spec_.head_dim;
    Norm(blk + "attn_norm", spec_.hidden);
    Weight(blk + "attn_q", spec_.hidden, query, 1.5f);
    Weight(blk + "attn_k", spec_.hidden, kv, 1.5f);
    Weight(blk + "attn_v", spec_.hidden, kv, 1);
    Weight(blk + "attn_output", query, spec_.hidden, 1);
    Norm(blk + "ffn_norm", spec_.hidden);
    Weight(blk + "ffn_gate", spec_.hidden, spec_.mlp, 1);
    Weight(blk + "ffn_up", spec_.hidden, spec_.mlp, 1);
    Weight(blk + "ffn_down", spec_.mlp, spec_.hidden, 1);
    if (spec_.architecture != "gemma3") return;
    Norm(blk + "attn_q_norm", spec_.head_dim);
    Norm(blk + "attn_k_norm", spec_.head_dim);
    Norm(blk + "post_attention_norm", spec_.hidden);
    Norm(blk + "post_ffw_norm", spec_.hidden);
  }

  void Weight(const std::string& name, int in, int out, float gain) {
    const GgmlType type = spec_.types[next_type_++ % spec_.types.size()];
    const float deviation = gain / std::sqrt(static_cast<float>(in));
    const size_t count = size_t(in) * out;
    std::string bytes;
    switch (type) {
      case GgmlType::kF32:
        for (const float v : Randoms(count, 0, deviation)) bytes += GgufBuilder::Raw(v);
        break;
      case GgmlType::kF16:
        for (const float v : Randoms(count, 0, deviation)) bytes += GgufBuilder::Raw(ToF16(v).bits);
        break;
      case GgmlType::kBF16:
        for (const float v : Randoms(count, 0, deviation)) bytes += GgufBuilder::Raw(ToBF16(v).bits);
        break;
      default: bytes = Blocks(type, count, deviation);
    }
    file_.Tensor(name + ".weight", {static_cast<uint64_t>(in), static_cast<uint64_t>(out)}, type, bytes);
  }

  // Every code is as likely as any other; d and its companion centre and scale what the codes stand for.
  std::string Blocks(GgmlType type, size_t count, float deviation) {
    switch (type) {
      case GgmlType::kQ4_0: return BlocksOf<kernels::BlockQ4_0>(count, 32, deviation / 4.6f, 0);
      case GgmlType::kQ4_1: return BlocksOf<kernels::BlockQ4_1>(count, 32, deviation / 4.6f, -7.5f);
      case GgmlType::kQ5_0: return BlocksOf<kernels::BlockQ5_0>(count, 32, deviation / 9.2f, 0);
      case GgmlType::kQ5_1: return BlocksOf<kernels::BlockQ5_1>(count, 32, deviation / 9.2f, -15.5f);
      case GgmlType::kQ8_0: return BlocksOf<kernels::BlockQ8_0>(count, 32, deviation / 74, 0);
      case GgmlType::kQ4_K: return BlocksOf<kernels::BlockQ4_K>(count, 256, deviation / 270, 7.5f);
      case GgmlType::kQ5_K: return BlocksOf<kernels::BlockQ5_K>(count, 256, deviation / 540, 15.5f);
      case GgmlType::kQ6_K: return BlocksOf<kernels::BlockQ6_K>(count, 256, deviation / 1370, 0);
      case GgmlType::kMXFP4: return BlocksOf<kernels::BlockMXFP4>(count, 32, deviation / 5.85f, 0);
      default: DT_CHECK(false);
    }
    return {};
  }

  template <typename Block>
  std::string BlocksOf(size_t count, size_t elements, float d, float companion) {
    DT_CHECK(count % elements == 0);
    std::string bytes;
    for (size_t i = 0; i < count / elements; ++i) {
      Block block;
      std::string random(sizeof(Block), '\0');
      for (char& c : random) c = static_cast<char>(random_() >> 56);
      std::memcpy(&block, random.data(), sizeof(Block));
      if constexpr (requires { block.e; }) {
        block.e = static_cast<uint8_t>(128 + std::lround(std::log2(d)));
      } else {
        block.d = ToF16(d).bits;
      }
      if constexpr (requires { block.m; }) block.m = ToF16(d * companion).bits;
      if constexpr (requires { block.dmin; }) block.dmin = ToF16(d * companion).bits;
      bytes.append(reinterpret_cast<const char*>(&block), sizeof(Block));
    }
    return bytes;
  }

  const TinyModelSpec& spec_;
  std::mt19937_64 random_;
  GgufBuilder file_;
  size_t next_type_ = 0;
};

}  // namespace

std::filesystem::path WriteTinyModel(const TinyModelSpec& spec, const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / (spec.architecture + "-" + std::to_string(spec.seed) + ".gguf");
  std::ofstream(path, std::ios::binary) << TinyModelWriter(spec).Build();
  return path;
}

}  // namespace dovetail::test
