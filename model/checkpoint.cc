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
    return absl::OkStatus();
  }

  static void Identify(Checkpoint& checkpoint, ModelConfig config, const fs::path& path, const fs::path& folder) {
    checkpoint.config_ = std::move(config);
    checkpoint.name_ = BaseName(path);
    checkpoint.folder_ = folder;
  }

 private:
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
    if (found.stored.shape != expected) {
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
    source.bytes = found.bytes.subspan(static_cast<size_t>(need.first_row * source.row_bytes),
                                       static_cast<size_t>(need.rows * source.row_bytes));
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
  if (interleaved_head_rows == 0) return r;
  const int64_t d = interleaved_head_rows, in_head = r % d;
  return r - in_head + 2 * (in_head % (d / 2)) + in_head / (d / 2);
}

std::vector<int32_t> TensorSource::RowOrder() const {
  std::vector<int32_t> order;
  if (interleaved_head_rows == 0) return order;
  order.resize(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) order[static_cast<size_t>(r)] = static_cast<int32_t>(SourceRow(r));
  return order;
}

void TensorSource::ReadRows(int64_t first, int64_t count, std::span<float> out) const {
  DT_CHECK(first >= 0 && count >= 0 && first + count <= rows && static_cast<int64_t>(out.size()) == count * cols);
  if (interleaved_head_rows == 0) {
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
