#include "engine/remote_model.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <sstream>
#include <utility>

#include "base/sha256.h"
#include "compute_worker/attention_specs.h"
#include "engine/model_digest.h"
#include "model/formats/gguf.h"
#include "model/pooling.h"

namespace dovetail::engine {
namespace fs = std::filesystem;
namespace {

constexpr const char* kGgufMetadata = "metadata.gguf";
// The files that model_text.cc looks for in the folder of the weights: what each is called on its way, and where it
// lies.
constexpr std::pair<const char*, const char*> kTextFiles[] = {{"tokenizer.json", "tokenizer.json"},
                                                              {"tokenizer_config.json", "tokenizer_config.json"},
                                                              {"chat_template.json", "chat_template.json"},
                                                              {"chat_template.jinja", "chat_template.jinja"},
                                                              {model::kFlatPoolingFile, model::kPoolingFile}};

void Append(std::string& out, const void* bytes, size_t size) { out.append(static_cast<const char*>(bytes), size); }
template <typename T>
void AppendNumber(std::string& out, T value) {
  Append(out, &value, sizeof(value));
}

void AppendString(std::string& out, std::string_view text) {
  AppendNumber<uint64_t>(out, text.size());
  Append(out, text.data(), text.size());
}

bool IsForServers(std::string_view key) {
  return key.rfind("tokenizer.", 0) == 0 || key.ends_with(model::kGgufPoolingSuffix);
}

// The part of a GGUF file's metadata that servers need, as a GGUF file without tensors.
std::string MetadataOf(const model::GgufFile& gguf) {
  std::string entries;
  uint64_t count = 0;
  for (const auto& [key, value] : gguf.metadata()) {
    if (!IsForServers(key)) continue;
    ++count;
    AppendString(entries, key);
    AppendNumber(entries, static_cast<uint32_t>(value.type));
    if (value.type == model::GgufValueType::kString) AppendNumber<uint64_t>(entries, value.bytes.size());
    if (value.type == model::GgufValueType::kArray) {
      AppendNumber(entries, static_cast<uint32_t>(value.element));
      AppendNumber<uint64_t>(entries, value.count);
    }
    Append(entries, value.bytes.data(), value.bytes.size());
  }
  std::string file = "GGUF";
  AppendNumber<uint32_t>(file, 3);
  AppendNumber<uint64_t>(file, 0);  // tensors
  AppendNumber<uint64_t>(file, count);
  return file + entries;
}

absl::StatusOr<std::string> ReadBounded(const fs::path& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (error || size > control::kMaxModelFileBytes)
    return InvalidArgument(path.filename().string(), ": is larger than ", control::kMaxModelFileBytes,
                           " bytes or cannot be read");
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in.good() && !in.eof()) return InvalidArgument(path.filename().string(), ": cannot be read");
  return std::move(text).str();
}

absl::StatusOr<std::vector<control::TextFile>> TextFilesOf(const model::Checkpoint& checkpoint) {
  std::vector<control::TextFile> files;
  if (checkpoint.gguf() != nullptr) {
    files.push_back({kGgufMetadata, MetadataOf(*checkpoint.gguf())});
    return files;
  }
  for (const auto& [name, file] : kTextFiles) {
    const fs::path path = checkpoint.folder() / file;
    std::error_code error;
    if (!fs::is_regular_file(path, error)) continue;
    DT_ASSIGN_OR_RETURN(std::string bytes, ReadBounded(path));
    files.push_back({name, std::move(bytes)});
  }
  return files;
}

std::string DigestOf(const std::string& bytes) {
  const Sha256Digest digest = Sha256(std::as_bytes(std::span(bytes.data(), bytes.size())));
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

// No weights: Find() of any name is kNotFound.
class RemoteCheckpoint final : public model::Checkpoint {
 public:
  RemoteCheckpoint(const control::ModelSummary& summary, const std::string& folder) {
    name_ = summary.name;
    folder_ = folder;
    config_.name = summary.name;
    config_.vocab_size = summary.vocab_size;
    config_.max_positions = summary.max_positions;
    config_.bos = summary.bos;
    config_.hidden_size = summary.hidden_size;
    config_.stop_ids = summary.stop_ids;
    config_.sampling.temperature = summary.temperature;
    config_.sampling.top_p = summary.top_p;
    config_.sampling.min_p = summary.min_p;
    config_.sampling.repetition_penalty = summary.repetition_penalty;
    if (summary.top_k) config_.sampling.top_k = *summary.top_k;
  }
  Format format() const override { return gguf_ != nullptr ? Format::kGguf : Format::kSafetensors; }
  std::vector<model::StoredTensor> stored_tensors() const override { return {}; }
  const model::GgufFile* gguf() const override { return gguf_.get(); }
  void SetGguf(std::unique_ptr<model::GgufFile> gguf) { gguf_ = std::move(gguf); }

 private:
  std::unique_ptr<model::GgufFile> gguf_;
};

}  // namespace

absl::StatusOr<control::ModelSummary> SummarizeModel(const model::Checkpoint& checkpoint, DType kv_dtype,
                                                     uint64_t weight_bytes, std::vector<control::TextFile>& files,
                                                     DType state_dtype) {
  const model::ModelConfig& config = checkpoint.config();
  control::ModelSummary summary;
  summary.name = checkpoint.name();
  summary.digest = ModelDigest(checkpoint, kv_dtype, state_dtype);
  DT_ASSIGN_OR_RETURN(summary.attention, compute::AttentionTableOf(config, kv_dtype, state_dtype));
  summary.vocab_size = static_cast<int>(config.vocab_size);
  summary.max_positions = config.max_positions;
  summary.bos = config.bos;
  summary.hidden_size = config.hidden_size;
  summary.stop_ids = config.stop_ids;
  const model::SamplingDefaults& defaults = config.sampling;
  const auto as_float = [](const std::optional<double>& value) {
    return value ? std::optional<float>(static_cast<float>(*value)) : std::nullopt;
  };
  summary.temperature = as_float(defaults.temperature);
  summary.top_p = as_float(defaults.top_p);
  summary.min_p = as_float(defaults.min_p);
  summary.repetition_penalty = as_float(defaults.repetition_penalty);
  if (defaults.top_k && *defaults.top_k >= 0 && *defaults.top_k < (1 << 24))
    summary.top_k = static_cast<int>(*defaults.top_k);
  for (const model::RopeSpec& rope : config.ropes)
    if (rope.kind == model::RopeKind::kDynamic || rope.kind == model::RopeKind::kLongRope)
      summary.length_ropes.push_back({static_cast<int>(rope.kind), rope.max_positions, rope.original_max_positions});
  summary.weight_bytes = weight_bytes;
  DT_ASSIGN_OR_RETURN(files, TextFilesOf(checkpoint));
  uint64_t total = 0;
  for (const control::TextFile& file : files) {
    summary.files.push_back({file.name, file.bytes.size(), DigestOf(file.bytes)});
    total += file.bytes.size();
  }
  if (total > control::kMaxModelFileBytes)
    return ResourceExhausted(checkpoint.name(), ": its tokenizer files have ", total, " bytes; servers take at most ",
                             control::kMaxModelFileBytes);
  return summary;
}

absl::StatusOr<std::unique_ptr<model::Checkpoint>> OpenRemoteModel(const control::ModelSummary& summary,
                                                                   const std::vector<control::TextFile>& files,
                                                                   const std::string& folder) {
  auto checkpoint = std::make_unique<RemoteCheckpoint>(summary, folder);
  for (const control::TextFile& file : files) {
    const fs::path path = fs::path(folder) / fs::path(file.name).filename();
    std::ofstream out(path, std::ios::binary);
    out.write(file.bytes.data(), static_cast<std::streamsize>(file.bytes.size()));
    out.close();
    if (!out)
      return ResourceExhausted(path.filename().string(), ": cannot be written to ", folder, "; is the disk full?");
    if (file.name != kGgufMetadata) continue;
    auto gguf = model::GgufFile::Open(path);
    if (!gguf.ok()) return Annotate(gguf.status(), summary.name);
    checkpoint->SetGguf(*std::move(gguf));
  }
  return std::unique_ptr<model::Checkpoint>(std::move(checkpoint));
}

}  // namespace dovetail::engine
