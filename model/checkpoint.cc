#include "model/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/check.h"
#include "model/families/checkpoint_tensors.h"
#include "model/formats/dequantize.h"
#include "model/formats/file_errors.h"
#include "model/formats/gguf.h"
#include "model/formats/json_file.h"
#include "model/formats/safetensors.h"

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
      const bool elsewhere = gguf && !need.in_gguf.empty();
      const std::optional<FoundTensor> found = elsewhere ? std::nullopt : lookup(name);
      const StoredPlace* other = elsewhere       ? OtherPlace(need.in_gguf, lookup)
                                 : found || gguf ? nullptr
                                                 : OtherPlace(need.others, lookup);
      if (!found && other == nullptr)
        return InvalidArgument(checkpoint.name_, ": tensor ", MissingNames(need, name, gguf), " is missing, which ",
                               View(Name(config.architecture)), " needs");
      TensorSource source;
      if (other != nullptr) {
        DT_ASSIGN_OR_RETURN(source, MakeOtherSource(checkpoint, need, *other, gguf, lookup));
        used.insert(other->names.begin(), other->names.end());
      } else {
        DT_ASSIGN_OR_RETURN(source, MakeSource(config, need, *found, gguf, lookup));
        used.insert(name);
        if (source.layout == TensorLayout::kE4M3) used.insert(name + "_scale");
      }
      checkpoint.index_.emplace(need.canonical, checkpoint.names_.size());
      checkpoint.names_.push_back(need.canonical);
      checkpoint.sources_.push_back(std::move(source));
    }
    WarnOfUnused(checkpoint, used);
    return ReadConstants(checkpoint);
  }

  static void Identify(Checkpoint& checkpoint, ModelConfig config, const fs::path& path, const fs::path& folder) {
    checkpoint.config_ = std::move(config);
    checkpoint.name_ = BaseName(path);
    checkpoint.folder_ = folder;
  }

 private:
  // The convolutions and skips of linear states, and sinks, become part of the config: attention workers are told of
  // them.
  static absl::Status ReadConstants(Checkpoint& checkpoint) {
    ModelConfig& config = checkpoint.config_;
    const bool states = config.state && config.state->conv_width > 0;
    if (!states && !config.sinks) return absl::OkStatus();
    config.constants.resize(config.layers.size());
    for (size_t layer = 0; layer < config.layers.size(); ++layer) {
      if (states && HasState(config.layers[layer].kind))
        DT_RETURN_IF_ERROR(ReadStateConstants(checkpoint, layer, config.constants[layer]));
      if (!config.sinks || !HasAttention(config.layers[layer].kind)) continue;
      DT_ASSIGN_OR_RETURN(const TensorSource sinks, checkpoint.Find(absl::StrCat("layers.", layer, ".attn.sinks")));
      config.constants[layer].sinks = sinks.ReadAll();
    }
    return absl::OkStatus();
  }

  static absl::Status ReadStateConstants(const Checkpoint& checkpoint, size_t layer,
                                         ModelConfig::LayerConstants& constants) {
    const StateConfig& s = *checkpoint.config_.state;
    const int64_t channels = 2 * s.key_dim + s.value_dim;
    const bool convolution = s.family == StateConfig::Family::kConvolution;
    constants.conv.resize(s.conv_width * s.heads * channels);
    if (s.conv_bias) constants.conv_bias.resize(s.heads * channels);
    struct Part {
      const char* name;
      int64_t dim;
      float multiplier;  // of the convolution's input
    };
    int64_t first = 0;  // channel of a head
    for (const Part& part : {Part{"q", s.key_dim, s.multipliers.q}, Part{"k", s.key_dim, s.multipliers.k},
                             Part{"v", s.value_dim, s.multipliers.v}}) {
      const int64_t begin = first;
      first += part.dim;
      if (convolution && part.dim != s.value_dim) continue;  // q and k are 0
      const std::string name = absl::StrCat("layers.", layer, ".state.conv_", part.name);
      DT_ASSIGN_OR_RETURN(const TensorSource weight, checkpoint.Find(name + ".weight"));
      const std::vector<float> taps = weight.ReadAll();  // [heads * dim][width]
      std::vector<float> bias;
      if (s.conv_bias) {
        DT_ASSIGN_OR_RETURN(const TensorSource source, checkpoint.Find(name + ".bias"));
        bias = source.ReadAll();
      }
      for (int64_t row = 0; row < s.heads * part.dim; ++row) {
        const int64_t channel = row / part.dim * channels + begin + row % part.dim;
        for (int64_t w = 0; w < s.conv_width; ++w)
          constants.conv[w * s.heads * channels + channel] = part.multiplier * taps[row * s.conv_width + w];
        if (s.conv_bias) constants.conv_bias[channel] = bias[row];
      }
    }
    if (convolution) constants.skip.assign(static_cast<size_t>(s.heads), 1.0f);
    if (s.family == StateConfig::Family::kMamba2) {
      DT_ASSIGN_OR_RETURN(const TensorSource skip, checkpoint.Find(absl::StrCat("layers.", layer, ".state.skip")));
      constants.skip = skip.ReadAll();
    }
    return absl::OkStatus();
  }

  // The first of the weight's other places whose tensors are there, or null.
  template <typename Lookup>
  static const StoredPlace* OtherPlace(const std::vector<StoredPlace>& places, const Lookup& lookup) {
    for (const StoredPlace& place : places)
      if (lookup(place.names.front())) return &place;
    return nullptr;
  }

  static std::string MissingNames(const TensorNeed& need, const std::string& name, bool gguf) {
    std::string text = gguf && !need.in_gguf.empty() ? "" : name;
    for (const StoredPlace& place : gguf ? need.in_gguf : need.others)
      absl::StrAppend(&text, text.empty() ? "" : " or ", place.names.front());
    return text;
  }

  template <typename Lookup>
  static absl::StatusOr<TensorSource> MakeOtherSource(const Checkpoint& checkpoint, const TensorNeed& need,
                                                      const StoredPlace& place, bool gguf, const Lookup& lookup) {
    std::vector<FoundTensor> parts;
    for (const std::string& name : place.names) {
      std::optional<FoundTensor> found = lookup(name);
      if (!found)
        return InvalidArgument(checkpoint.name_, ": tensor ", name, " is missing, though ", place.names.front(),
                               " is there");
      parts.push_back(*std::move(found));
    }
    switch (place.layout) {
      case TensorLayout::kRows: {
        TensorNeed here = need;
        here.pattern = place.pattern;
        here.stored_rows = place.stored_rows;
        here.first_row = 0;
        return MakeSource(checkpoint.config_, here, parts.front(), gguf, lookup);
      }
      case TensorLayout::kJoined: return JoinParts(need, place, parts);
      case TensorLayout::kColumns: return MakeColumns(need, place, parts.front());
      case TensorLayout::kMxfp4: return MakeMxfp4(need, place, parts);
      case TensorLayout::kE4M3: break;  // as a weight is stored, not where
    }
    return Internal("no such layout");
  }

  static std::string What(const FoundTensor& found) {
    return absl::StrCat(View(found.stored.file), ": tensor ", Printable(found.stored.name));
  }

  // `shape` with all dimensions but the last `dims - 1` as rows.
  static std::vector<int64_t> Flattened(std::vector<int64_t> shape, size_t dims) {
    if (shape.size() <= dims) return shape;
    int64_t rows = 1;
    for (size_t i = 0; i + dims - 1 < shape.size(); ++i) rows *= shape[i];
    shape.erase(shape.begin(), shape.end() - static_cast<int64_t>(dims));
    shape[0] = rows;
    return shape;
  }

  static absl::Status CheckShape(const FoundTensor& found, const std::vector<int64_t>& expected, bool flattened) {
    const std::vector<int64_t>& shape = found.stored.shape;
    if ((flattened ? Flattened(shape, expected.size()) : shape) == expected) return absl::OkStatus();
    if (flattened && expected.size() == 2 && expected[0] == 1 && shape.size() == 1 && shape[0] == expected[1])
      return absl::OkStatus();  // one row, written as a vector
    return InvalidArgument(What(found), ": its shape is ", ShapeText(found.stored.shape), ", but the config asks for ",
                           ShapeText(expected));
  }

  static TensorSource SourceOf(const TensorNeed& need, const StoredPlace& place, const FoundTensor& found,
                               GgmlType type) {
    TensorSource source;
    source.file = found.stored.file;
    source.stored_name = found.stored.name;
    source.type = type;
    source.rows = need.rows;
    source.cols = std::max<int64_t>(need.cols, 1);
    source.row_bytes = RowBytes(type, source.cols);
    source.pattern = place.pattern;
    source.layout = place.layout;
    source.bytes = found.bytes;
    return source;
  }

  static absl::Status CheckFloat(const FoundTensor& found) {
    if (found.type && !IsQuantized(*found.type)) return absl::OkStatus();
    return Unimplemented(What(found), " is stored as ", View(found.stored.type), "; F32, F16 and BF16 are read here");
  }

  // Rows of several tensors that together are the stored rows.
  static absl::StatusOr<TensorSource> JoinParts(const TensorNeed& need, const StoredPlace& place,
                                                const std::vector<FoundTensor>& parts) {
    int64_t rows = 0;
    for (const FoundTensor& part : parts) {
      DT_RETURN_IF_ERROR(CheckFloat(part));
      const std::vector<int64_t> shape = Flattened(part.stored.shape, need.cols > 0 ? 2 : 1);
      rows += shape.empty() ? 0 : shape[0];
      DT_RETURN_IF_ERROR(CheckShape(
          part, need.cols > 0 ? std::vector<int64_t>{shape.empty() ? 0 : shape[0], need.cols} : shape, true));
      if (part.type != parts.front().type)
        return InvalidArgument(What(part), " is stored as ", View(part.stored.type), ", but ", place.names.front(),
                               " as ", View(parts.front().stored.type));
    }
    if (rows != place.stored_rows)
      return InvalidArgument(What(parts.front()), ": it and the ", parts.size() - 1, " other tensors have ", rows,
                             " rows, but the config asks for ", place.stored_rows);
    TensorSource source = SourceOf(need, place, parts.front(), *parts.front().type);
    for (size_t i = 1; i < parts.size(); ++i) source.more.push_back(parts[i].bytes);
    return source;
  }

  static absl::StatusOr<TensorSource> MakeColumns(const TensorNeed& need, const StoredPlace& place,
                                                  const FoundTensor& found) {
    if (!found.type) DT_RETURN_IF_ERROR(CheckFloat(found));
    DT_RETURN_IF_ERROR(CheckShape(found, {place.stored_rows, place.stored_cols}, true));
    const GgmlType stored = *found.type;
    TensorSource source = SourceOf(need, place, found, IsQuantized(stored) ? GgmlType::kF32 : stored);
    source.stored_cols = place.stored_cols;
    source.stored_type = stored;
    const int64_t row_bytes = RowBytes(stored, place.stored_cols);
    source.bytes = found.bytes.subspan(static_cast<size_t>(place.first_row * row_bytes),
                                       static_cast<size_t>((place.stored_rows - place.first_row) * row_bytes));
    return source;
  }

  static absl::StatusOr<TensorSource> MakeMxfp4(const TensorNeed& need, const StoredPlace& place,
                                                const std::vector<FoundTensor>& parts) {
    const int64_t groups = need.cols / BlockElements(GgmlType::kMXFP4);
    if (need.cols % BlockElements(GgmlType::kMXFP4) != 0)
      return InvalidArgument(What(parts[0]), " needs rows of ", need.cols,
                             " values, which are no whole number of blocks of 32");
    for (const FoundTensor& part : parts)
      if (part.stored.type != "U8")
        return Unimplemented(What(part), " is stored as ", View(part.stored.type), "; MXFP4 is read from U8");
    const auto bytes_of_rows = [&](int64_t bytes) { return std::vector<int64_t>{place.stored_rows, bytes}; };
    std::vector<int64_t> codes = parts[0].stored.shape;  // [.., rows, groups, 16]
    const bool grouped = codes.size() >= 3 && codes.back() == 16 && codes[codes.size() - 2] == groups;
    if (!grouped)
      return InvalidArgument(What(parts[0]), ": its shape is ", ShapeText(codes), ", but the config asks for [.., ",
                             groups, ", 16]");
    FoundTensor joined = parts[0];
    joined.stored.shape.pop_back();
    joined.stored.shape.back() = 16 * groups;
    DT_RETURN_IF_ERROR(CheckShape(joined, bytes_of_rows(16 * groups), true));
    DT_RETURN_IF_ERROR(CheckShape(parts[1], bytes_of_rows(groups), true));
    TensorSource source = SourceOf(need, place, parts[0], GgmlType::kMXFP4);
    source.more.push_back(parts[1].bytes);
    return source;
  }

  static absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

  static std::string ShapeText(const std::vector<int64_t>& shape) {
    std::string text;
    for (const int64_t size : shape) absl::StrAppend(&text, text.empty() ? "" : ", ", size);
    return absl::StrCat("[", text, "]");
  }

  // weight and weight_scale, as compressed-tensors and fbgemm write FP8: a scale for the tensor, or one for each row.
  template <typename Lookup>
  static absl::StatusOr<TensorSource> MakeE4M3(const TensorNeed& need, const FoundTensor& found, const Lookup& lookup) {
    const std::string scale_name = absl::StrCat(View(found.stored.name), "_scale");
    const std::optional<FoundTensor> scale = lookup(scale_name);
    if (!scale)
      return Unimplemented(What(found), " is stored as F8_E4M3, and tensor ", Printable(scale_name), " is missing; ",
                           lookup(scale_name + "_inv") ? "scales of blocks (weight_scale_inv) are not served"
                                                       : "E4M3 is read with a scale for each row, or one for all");
    DT_RETURN_IF_ERROR(CheckFloat(*scale));
    DT_RETURN_IF_ERROR(CheckShape(found, {need.stored_rows, need.cols}, need.flattened));
    if (scale->stored.elements != 1 && scale->stored.elements != need.stored_rows)
      return Unimplemented(What(*scale), ": its shape is ", ShapeText(scale->stored.shape), "; a scale for each of ",
                           need.stored_rows, " rows, or one for all, is read");
    const int64_t taken = need.pattern.rows > 0 ? need.stored_rows : need.rows;
    StoredPlace place;
    place.layout = TensorLayout::kE4M3;
    place.pattern = need.pattern;
    TensorSource source = SourceOf(need, place, found, GgmlType::kBF16);
    source.bytes =
        found.bytes.subspan(static_cast<size_t>(need.first_row * need.cols), static_cast<size_t>(taken * need.cols));
    source.scales.resize(static_cast<size_t>(scale->stored.elements));
    Dequantize(*scale->type, scale->bytes.data(), scale->stored.elements, source.scales.data());
    for (const float s : source.scales)
      if (!std::isfinite(s)) return InvalidArgument(What(*scale), " has a scale that is not finite");
    if (source.scales.size() > 1) {
      source.scales.erase(source.scales.begin(), source.scales.begin() + need.first_row);
      source.scales.resize(static_cast<size_t>(taken));
    }
    return source;
  }

  template <typename Lookup>
  static absl::StatusOr<TensorSource> MakeSource(const ModelConfig& config, const TensorNeed& need,
                                                 const FoundTensor& found, bool gguf, const Lookup& lookup) {
    const std::string what = What(found);
    if (found.stored.type == "F8_E4M3" && need.cols > 0 && !need.norm) return MakeE4M3(need, found, lookup);
    if (!found.type)
      return Unimplemented(what, " is stored as ", View(found.stored.type),
                           "; F32, F16, BF16 and, with scales, F8_E4M3 are read from safetensors");
    std::vector<int64_t> expected{need.stored_rows};
    if (need.cols != 0) expected.push_back(need.cols);
    DT_RETURN_IF_ERROR(CheckShape(found, expected, need.flattened));
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
