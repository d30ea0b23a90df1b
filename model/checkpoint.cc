#include "model/checkpoint.h"

#include <algorithm>
#include <set>

#include "base/check.h"
#include "model/checkpoint_tensors.h"
#include "model/dequantize.h"
#include "model/file_errors.h"
#include "model/gguf.h"
#include "model/json_file.h"
#include "model/safetensors.h"

namespace dovetail::model {
namespace fs = std::filesystem;

struct FoundTensor {
  StoredTensor stored;
  std::optional<GgmlType> type;  // nullopt: a type that is not read
  std::span<const std::byte> bytes;
};

// Resolves what the config needs in what the files hold; `lookup(name)` gives an optional<FoundTensor>.
class CheckpointBuilder {
 public:
  template <typename Lookup>
  static absl::Status Resolve(Checkpoint& checkpoint, bool gguf, const Lookup& lookup) {
    const ModelConfig& config = checkpoint.config_;
    std::set<std::string, std::less<>> used;
    for (const TensorNeed& need : TensorsOf(config)) {
      const std::string& name = gguf ? need.gguf : need.hf;
      const std::optional<FoundTensor> found = lookup(name);
      if (!found)
        return InvalidArgument(checkpoint.name_, ": tensor ", name, " is missing, which ",
                               View(Name(config.architecture)), " needs");
      DT_ASSIGN_OR_RETURN(TensorSource source, MakeSource(config, need, *found, gguf));
      checkpoint.index_.emplace(need.canonical, checkpoint.names_.size());
      checkpoint.names_.push_back(need.canonical);
      checkpoint.sources_.push_back(source);
      used.insert(name);
    }
    WarnOfUnused(checkpoint, used);
    return ReadStateConstants(checkpoint);
  }

  static void Identify(Checkpoint& checkpoint, ModelConfig config, const fs::path& path, const fs::path& folder) {
    checkpoint.config_ = std::move(config);
    checkpoint.name_ = BaseName(path);
    checkpoint.folder_ = folder;
  }

 private:
  // The convolutions and skips of linear states become part of the config: attention workers are told of them.
  static absl::Status ReadStateConstants(Checkpoint& checkpoint) {
    ModelConfig& config = checkpoint.config_;
    if (!config.state || config.state->conv_width == 0) return absl::OkStatus();
    config.state_constants.resize(config.layers.size());
    const StateConfig& s = *config.state;
    for (size_t layer = 0; layer < config.layers.size(); ++layer) {
      if (config.layers[layer].kind != LayerKind::kLinearState) continue;
      ModelConfig::StateConstants& constants = config.state_constants[layer];
      const int64_t channels = 2 * s.key_dim + s.value_dim;
      constants.conv.resize(s.conv_width * s.heads * channels);
      if (s.conv_bias) constants.conv_bias.resize(s.heads * channels);
      int64_t first = 0;  // channel of a head
      for (const auto& [part, dim] : {std::pair{"q", s.key_dim}, {"k", s.key_dim}, {"v", s.value_dim}}) {
        const std::string name = absl::StrCat("layers.", layer, ".state.conv_", part);
        DT_ASSIGN_OR_RETURN(const TensorSource weight, checkpoint.Find(name + ".weight"));
        const std::vector<float> taps = weight.ReadAll();  // [heads * dim][width]
        std::vector<float> bias;
        if (s.conv_bias) {
          DT_ASSIGN_OR_RETURN(const TensorSource source, checkpoint.Find(name + ".bias"));
          bias = source.ReadAll();
        }
        for (int64_t row = 0; row < s.heads * dim; ++row) {
          const int64_t channel = row / dim * channels + first + row % dim;
          for (int64_t w = 0; w < s.conv_width; ++w)
            constants.conv[w * s.heads * channels + channel] = taps[row * s.conv_width + w];
          if (s.conv_bias) constants.conv_bias[channel] = bias[row];
        }
        first += dim;
      }
      if (s.family == StateConfig::Family::kMamba2) {
        DT_ASSIGN_OR_RETURN(const TensorSource skip, checkpoint.Find(absl::StrCat("layers.", layer, ".state.skip")));
        constants.skip = skip.ReadAll();
      }
    }
    return absl::OkStatus();
  }

  static absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

  static std::string ShapeText(const std::vector<int64_t>& shape) {
    std::string text;
    for (const int64_t size : shape) absl::StrAppend(&text, text.empty() ? "" : ", ", size);
    return absl::StrCat("[", text, "]");
  }

  static absl::StatusOr<TensorSource> MakeSource(const ModelConfig& config, const TensorNeed& need,
                                                 const FoundTensor& found, bool gguf) {
    const std::string what = absl::StrCat(View(found.stored.file), ": tensor ", Printable(found.stored.name));
    if (!found.type)
      return Unimplemented(what, " is stored as ", View(found.stored.type),
                           "; F32, F16 and BF16 are read from safetensors");
    std::vector<int64_t> expected{need.stored_rows};
    if (need.cols != 0) expected.push_back(need.cols);
    std::vector<int64_t> shape = found.stored.shape;
    if (need.flattened && shape.size() > expected.size()) {
      int64_t rows = 1;
      for (size_t i = 0; i + expected.size() - 1 < shape.size(); ++i) rows *= shape[i];
      shape.erase(shape.begin(), shape.end() - static_cast<int64_t>(expected.size()));
      shape[0] = rows;
    }
    if (shape != expected) {
      return InvalidArgument(what, ": its shape is ", ShapeText(found.stored.shape), ", but the config asks for ",
                             ShapeText(expected));
    }
    TensorSource source;
    source.file = found.stored.file;
    source.stored_name = found.stored.name;
    source.type = *found.type;
    source.rows = need.rows;
    source.cols = std::max<int64_t>(need.cols, 1);
    if (need.cols == 0 && IsQuantized(source.type)) {
      return Unimplemented(what, " is a vector stored as ", View(found.stored.type),
                           "; vectors are read as F32, F16 and BF16");
    }
    source.row_bytes = RowBytes(source.type, source.cols);
    source.pattern = need.pattern;
    const int64_t taken = need.pattern.rows > 0 ? need.stored_rows : need.rows;
    source.bytes = found.bytes.subspan(static_cast<size_t>(need.first_row * source.row_bytes),
                                       static_cast<size_t>(taken * source.row_bytes));
    if (gguf) source.interleaved_head_rows = need.interleaved_head_rows;
    if (need.norm && config.norms_stored_minus_one) source.add = 1.0f;
    return source;
  }

  static void WarnOfUnused(Checkpoint& checkpoint, const std::set<std::string, std::less<>>& used) {
    size_t unnamed = 0;
    for (const StoredTensor& tensor : checkpoint.stored_tensors()) {
      if (used.contains(tensor.name) || IsIgnoredTensor(checkpoint.config_, tensor.name)) continue;
      if (checkpoint.warnings_.size() + 1 < Checkpoint::kMaxWarnings) {
        checkpoint.warnings_.push_back(absl::StrCat(View(tensor.file), ": tensor ", Printable(tensor.name),
                                                    " is not used by ", View(Name(checkpoint.config_.architecture))));
      } else {
        ++unnamed;
      }
    }
    if (unnamed > 0) checkpoint.warnings_.push_back(absl::StrCat(unnamed, " more tensors are not used"));
  }
};

namespace {

class GgufCheckpoint : public Checkpoint {
 public:
  explicit GgufCheckpoint(std::unique_ptr<GgufFile> file) : file_(std::move(file)) {}
  Format format() const override { return Format::kGguf; }
  const GgufFile* gguf() const override { return file_.get(); }

  StoredTensor Stored(const GgufTensor& tensor) const {
    return {file_->part_name(tensor.part),
            tensor.name,
            Name(tensor.type),
            {tensor.dims.rbegin(), tensor.dims.rend()},
            tensor.elements,
            static_cast<int64_t>(tensor.bytes.size())};
  }
  std::vector<StoredTensor> stored_tensors() const override {
    std::vector<StoredTensor> all;
    for (const GgufTensor& tensor : file_->tensors()) all.push_back(Stored(tensor));
    return all;
  }
  std::optional<FoundTensor> Lookup(const std::string& name) const {
    const GgufTensor* tensor = file_->FindTensor(name);
    if (tensor == nullptr) return std::nullopt;
    return FoundTensor{Stored(*tensor), tensor->type, tensor->bytes};
  }

 private:
  std::unique_ptr<GgufFile> file_;
};

std::optional<GgmlType> TypeOfDtype(std::string_view dtype) {
  if (dtype == "F32") return GgmlType::kF32;
  if (dtype == "F16") return GgmlType::kF16;
  if (dtype == "BF16") return GgmlType::kBF16;
  return std::nullopt;
}

class SafetensorsCheckpoint : public Checkpoint {
 public:
  explicit SafetensorsCheckpoint(std::unique_ptr<SafetensorsFile> file) : file_(std::move(file)) {}
  Format format() const override { return Format::kSafetensors; }

  StoredTensor Stored(const SafetensorsTensor& tensor) const {
    return {file_->shard_name(tensor.shard),          tensor.name, tensor.dtype, tensor.shape, tensor.elements,
            static_cast<int64_t>(tensor.bytes.size())};
  }
  std::vector<StoredTensor> stored_tensors() const override {
    std::vector<StoredTensor> all;
    for (const SafetensorsTensor& tensor : file_->tensors()) all.push_back(Stored(tensor));
    return all;
  }
  std::optional<FoundTensor> Lookup(const std::string& name) const {
    const SafetensorsTensor* tensor = file_->Find(name);
    if (tensor == nullptr) return std::nullopt;
    return FoundTensor{Stored(*tensor), TypeOfDtype(tensor->dtype), tensor->bytes};
  }

 private:
  std::unique_ptr<SafetensorsFile> file_;
};

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenGguf(const fs::path& path) {
  DT_ASSIGN_OR_RETURN(auto file, GgufFile::Open(path));
  DT_ASSIGN_OR_RETURN(ModelConfig config, ConfigFromGguf(*file));
  auto checkpoint = std::make_unique<GgufCheckpoint>(std::move(file));
  CheckpointBuilder::Identify(*checkpoint, std::move(config), path, path.parent_path());
  DT_RETURN_IF_ERROR(CheckpointBuilder::Resolve(*checkpoint, /*gguf=*/true,
                                                [&](const std::string& name) { return checkpoint->Lookup(name); }));
  return checkpoint;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenFolder(const fs::path& folder) {
  DT_ASSIGN_OR_RETURN(const nlohmann::json config_json, ReadJsonFile(folder / "config.json"));
  nlohmann::json generation = nullptr;
  std::error_code ignored;
  if (fs::exists(folder / "generation_config.json", ignored)) {
    DT_ASSIGN_OR_RETURN(generation, ReadJsonFile(folder / "generation_config.json"));
  }
  DT_ASSIGN_OR_RETURN(ModelConfig config, ConfigFromJson("config.json", config_json, generation));
  DT_ASSIGN_OR_RETURN(auto file, SafetensorsFile::OpenFolder(folder));
  auto checkpoint = std::make_unique<SafetensorsCheckpoint>(std::move(file));
  CheckpointBuilder::Identify(*checkpoint, std::move(config), folder, folder);
  DT_RETURN_IF_ERROR(CheckpointBuilder::Resolve(*checkpoint, /*gguf=*/false,
                                                [&](const std::string& name) { return checkpoint->Lookup(name); }));
  return checkpoint;
}

// The GGUF models in a folder: single files, and the first parts of split ones.
std::vector<fs::path> GgufModelsIn(const fs::path& folder) {
  std::vector<fs::path> models;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.ends_with(".gguf")) continue;
    const size_t of = name.rfind("-of-");
    const bool later_part =
        of != std::string::npos && of >= 6 && name[of - 6] == '-' && name.substr(of - 5, 5) != "00001";
    if (!later_part) models.push_back(it->path());
  }
  std::sort(models.begin(), models.end());
  return models;
}

}  // namespace

int64_t TensorSource::SourceRow(int64_t r) const {
  if (pattern.rows > 0) return pattern.SourceRow(r);
  if (interleaved_head_rows == 0) return r;
  const int64_t d = interleaved_head_rows, in_head = r % d;
  return r - in_head + 2 * (in_head % (d / 2)) + in_head / (d / 2);
}

std::vector<int32_t> TensorSource::RowOrder() const {
  std::vector<int32_t> order;
  if (interleaved_head_rows == 0 && pattern.rows == 0) return order;
  order.resize(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) order[static_cast<size_t>(r)] = static_cast<int32_t>(SourceRow(r));
  return order;
}

void TensorSource::ReadRows(int64_t first, int64_t count, std::span<float> out) const {
  DT_CHECK(first >= 0 && count >= 0 && first + count <= rows && static_cast<int64_t>(out.size()) == count * cols);
  if (interleaved_head_rows == 0 && pattern.rows == 0) {
    Dequantize(type, bytes.data() + first * row_bytes, count * cols, out.data());
  } else {
    for (int64_t r = 0; r < count; ++r)
      Dequantize(type, bytes.data() + SourceRow(first + r) * row_bytes, cols, out.data() + r * cols);
  }
  if (add != 0) {
    for (float& value : out) value += add;
  }
}

std::vector<float> TensorSource::ReadAll() const {
  std::vector<float> values(static_cast<size_t>(rows * cols));
  ReadRows(0, rows, values);
  return values;
}

absl::StatusOr<TensorSource> Checkpoint::Find(std::string_view canonical) const {
  const auto it = index_.find(std::string(canonical));
  if (it == index_.end()) return NotFound(name_, ": the model has no weight called ", Printable(canonical));
  return sources_[it->second];
}

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenCheckpoint(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) return NotFound(BaseName(path), ": no such file or folder");
  if (!fs::is_directory(status)) return OpenGguf(path);
  if (fs::exists(path / "config.json", error)) return OpenFolder(path);
  const std::vector<fs::path> models = GgufModelsIn(path);
  if (models.size() == 1) return OpenGguf(models.front());
  if (models.empty())
    return NotFound(
        BaseName(path),
        ": holds neither config.json nor a .gguf file; name a GGUF file or the folder of a Hugging Face model");
  return InvalidArgument(BaseName(path), ": holds ", models.size(), " GGUF models; name one of them, for example ",
                         BaseName(models.front()));
}

}  // namespace dovetail::model
