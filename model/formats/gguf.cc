#include "model/formats/gguf.h"

#include <cstdio>
#include <cstring>

#include "absl/strings/str_format.h"
#include "model/formats/file_errors.h"

namespace dovetail::model {
namespace {

constexpr int64_t kMaxParts = 1024;

absl::string_view Text(std::string_view text) { return {text.data(), text.size()}; }

template <typename T>
T LoadAt(std::span<const std::byte> bytes, uint64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

// Element `index` of `bytes` as int64; nullopt if `type` is no integer or the value does not fit.
std::optional<int64_t> LoadInt(GgufValueType type, std::span<const std::byte> bytes, uint64_t index) {
  switch (type) {
    case GgufValueType::kU8: return LoadAt<uint8_t>(bytes, index);
    case GgufValueType::kI8: return LoadAt<int8_t>(bytes, index);
    case GgufValueType::kU16: return LoadAt<uint16_t>(bytes, index);
    case GgufValueType::kI16: return LoadAt<int16_t>(bytes, index);
    case GgufValueType::kU32: return LoadAt<uint32_t>(bytes, index);
    case GgufValueType::kI32: return LoadAt<int32_t>(bytes, index);
    case GgufValueType::kI64: return LoadAt<int64_t>(bytes, index);
    case GgufValueType::kU64: {
      const auto value = LoadAt<uint64_t>(bytes, index);
      if (value > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
      return static_cast<int64_t>(value);
    }
    default: return std::nullopt;
  }
}

std::optional<double> LoadFloat(GgufValueType type, std::span<const std::byte> bytes, uint64_t index) {
  if (type == GgufValueType::kF32) return LoadAt<float>(bytes, index);
  if (type == GgufValueType::kF64) return LoadAt<double>(bytes, index);
  if (const auto integer = LoadInt(type, bytes, index)) return static_cast<double>(*integer);
  return std::nullopt;
}

std::string Describe(const GgufValue& value) {
  if (value.type == GgufValueType::kArray) {
    return absl::StrCat("an array of ", Commas(value.count), " ", Text(Name(value.element)));
  }
  return std::string(Name(value.type));
}

// "<stem>-00001-of-00003.gguf": the stem, or nullopt for another name.
std::optional<std::string> SplitStem(const std::string& name, int64_t number, int64_t count) {
  const std::string tail = absl::StrFormat("-%05d-of-%05d.gguf", number, count);
  if (name.size() <= tail.size() || !name.ends_with(tail)) return std::nullopt;
  return name.substr(0, name.size() - tail.size());
}

// Looks a key up in one part's own list: parts carry few keys.
std::optional<int64_t> PartInt(const GgufContents& part, std::string_view key) {
  for (const auto& [name, value] : part.metadata) {
    if (name == key) return LoadInt(value.type, value.bytes, 0);
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Open(const std::filesystem::path& path) {
  std::unique_ptr<GgufFile> result(new GgufFile());
  DT_ASSIGN_OR_RETURN(auto file, MappedFile::Open(path));
  DT_ASSIGN_OR_RETURN(GgufContents contents, ParseGguf(file->name(), file->bytes()));
  const std::string name = file->name();
  result->files_.push_back(std::move(file));
  DT_RETURN_IF_ERROR(result->Add(name, std::move(contents)));
  DT_RETURN_IF_ERROR(result->OpenOtherParts(path));
  return result;
}

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::FromBytes(const std::string& name,
                                                              std::span<const std::byte> bytes) {
  std::unique_ptr<GgufFile> result(new GgufFile());
  DT_ASSIGN_OR_RETURN(GgufContents contents, ParseGguf(name, bytes));
  DT_RETURN_IF_ERROR(result->Add(name, std::move(contents)));
  return result;
}

absl::Status GgufFile::Add(const std::string& name, GgufContents contents) {
  const int part = static_cast<int>(part_names_.size());
  part_names_.push_back(name);
  if (part == 0) {
    version_ = contents.version;
    metadata_ = std::move(contents.metadata);
    for (size_t i = 0; i < metadata_.size(); ++i) key_index_.emplace(metadata_[i].first, i);
  }
  for (GgufTensor& tensor : contents.tensors) {
    tensor.part = part;
    if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) {
      return InvalidArgument(name, ": tensor ", Printable(tensor.name), " is also in ", part_names_.front(),
                             " or a part before this one");
    }
    tensors_.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

absl::Status GgufFile::OpenOtherParts(const std::filesystem::path& first) {
  DT_ASSIGN_OR_RETURN(const auto count, Int("split.count"));
  if (!count || *count <= 1) return absl::OkStatus();
  if (*count > kMaxParts) {
    return InvalidArgument(name(), ": split.count is ", *count, "; at most ", kMaxParts, " parts are read");
  }
  DT_ASSIGN_OR_RETURN(const auto number, Int("split.no"));
  if (number.value_or(0) != 0) {
    return InvalidArgument(name(), ": is part ", *number + 1, " of ", *count,
                           " of a split model; open the part that ends in ",
                           absl::StrFormat("-00001-of-%05d.gguf", *count));
  }
  const auto stem = SplitStem(name(), 1, *count);
  if (!stem) {
    return InvalidArgument(name(), ": is the first of ", *count, " parts, so it must be called <name>",
                           absl::StrFormat("-00001-of-%05d.gguf", *count),
                           " and lie in the same folder; give it its name back");
  }
  for (int64_t i = 2; i <= *count; ++i) {
    const std::string part = absl::StrFormat("%s-%05d-of-%05d.gguf", *stem, i, *count);
    auto file = MappedFile::Open(first.parent_path() / part);
    if (!file.ok()) return Annotate(file.status(), absl::StrCat(name(), ": part ", i, " of ", *count));
    DT_ASSIGN_OR_RETURN(GgufContents contents, ParseGguf(part, (*file)->bytes()));
    if (PartInt(contents, "split.no") != i - 1 || PartInt(contents, "split.count") != *count) {
      return InvalidArgument(part, ": its split.no and split.count do not say that it is part ", i, " of ", *count,
                             "; the parts are of different models");
    }
    files_.push_back(*std::move(file));
    DT_RETURN_IF_ERROR(Add(part, std::move(contents)));
  }
  DT_ASSIGN_OR_RETURN(const auto total, Int("split.tensors.count"));
  if (total && *total != static_cast<int64_t>(tensors_.size())) {
    return InvalidArgument(name(), ": split.tensors.count is ", *total, ", but the ", *count, " parts hold ",
                           tensors_.size(), " tensors");
  }
  return absl::OkStatus();
}

const GgufTensor* GgufFile::FindTensor(std::string_view tensor) const {
  const auto it = tensor_index_.find(tensor);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

const GgufValue* GgufFile::Find(std::string_view key) const {
  const auto it = key_index_.find(key);
  return it == key_index_.end() ? nullptr : &metadata_[it->second].second;
}

absl::Status GgufFile::WrongType(std::string_view key, std::string_view wanted, const GgufValue& found) const {
  return InvalidArgument(name(), ": metadata key ", Printable(key), " must be ", Text(wanted), ", but is ",
                         Describe(found));
}

absl::StatusOr<std::optional<int64_t>> GgufFile::Int(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto integer = LoadInt(value->type, value->bytes, 0)) return integer;
  return WrongType(key, "an integer of at most 63 bits", *value);
}

absl::StatusOr<std::optional<double>> GgufFile::Float(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (const auto number = LoadFloat(value->type, value->bytes, 0)) return number;
  return WrongType(key, "a number", *value);
}

absl::StatusOr<std::optional<bool>> GgufFile::Bool(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type == GgufValueType::kBool) return std::optional<bool>(value->bytes[0] != std::byte{0});
  return WrongType(key, "a bool", *value);
}

absl::StatusOr<std::optional<std::string_view>> GgufFile::String(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufValueType::kString) return WrongType(key, "a string", *value);
  return std::string_view(reinterpret_cast<const char*>(value->bytes.data()), value->bytes.size());
}

absl::StatusOr<std::optional<std::vector<int64_t>>> GgufFile::Ints(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  const auto element = value->element == GgufValueType::kBool ? GgufValueType::kU8 : value->element;
  std::vector<int64_t> result;
  if (value->type != GgufValueType::kArray) return WrongType(key, "an array of integers", *value);
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto integer = LoadInt(element, value->bytes, i);
    if (!integer) return WrongType(key, "an array of integers of at most 63 bits", *value);
    result.push_back(*integer);
  }
  return result;
}

absl::StatusOr<std::optional<std::vector<float>>> GgufFile::Floats(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  std::vector<float> result;
  if (value->type != GgufValueType::kArray) return WrongType(key, "an array of numbers", *value);
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto number = LoadFloat(value->element, value->bytes, i);
    if (!number) return WrongType(key, "an array of numbers", *value);
    result.push_back(static_cast<float>(*number));
  }
  return result;
}

absl::StatusOr<std::optional<std::vector<std::string_view>>> GgufFile::Strings(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufValueType::kArray || value->element != GgufValueType::kString) {
    return WrongType(key, "an array of strings", *value);
  }
  std::vector<std::string_view> result;
  result.reserve(value->count);
  const char* at = reinterpret_cast<const char*>(value->bytes.data());
  for (uint64_t i = 0; i < value->count; ++i) {
    uint64_t length = 0;
    std::memcpy(&length, at, 8);
    result.emplace_back(at + 8, length);
    at += 8 + length;
  }
  return result;
}

}  // namespace dovetail::model
