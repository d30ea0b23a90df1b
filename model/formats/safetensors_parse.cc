#include "model/formats/safetensors_parse.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "absl/container/flat_hash_set.h"
#include "model/formats/file_errors.h"
#include "nlohmann/json.hpp"

namespace dovetail::model {
namespace {

struct DtypeBits {
  std::string_view name;
  uint64_t bits;
};

constexpr DtypeBits kDtypes[] = {
    {"BOOL", 8},        {"U8", 8},          {"I8", 8},      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},        {"F32", 32},    {"C64", 64},    {"F64", 64},    {"I64", 64},
    {"U64", 64},        {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6},
};

std::optional<uint64_t> BitsOf(std::string_view dtype) {
  for (const DtypeBits& known : kDtypes) {
    if (known.name == dtype) return known.bits;
  }
  return std::nullopt;
}

struct Entry {
  SafetensorsTensor tensor;
  bool has_dtype = false, has_shape = false, has_offsets = false;
  std::vector<uint64_t> offsets;
};

// Takes the header's JSON event by event, so that nothing but the format's own shape is ever built: an object of
// objects, whose members are dtype, shape and data_offsets. The first violation stops the parser and stays in `error`.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<Entry> entries;
  std::string error;

  bool start_object(std::size_t) override {
    if (level_ == Level::kOutside) return Enter(Level::kTop);
    if (level_ == Level::kTop) return Enter(metadata_ ? Level::kMetadata : Level::kEntry);
    return Refuse("holds an object where none belongs");
  }

  bool end_object() override {
    if (level_ == Level::kEntry) {
      const Entry& entry = entries.back();
      if (!entry.has_dtype) return Refuse("has no dtype");
      if (!entry.has_shape) return Refuse("has no shape");
      if (!entry.has_offsets) return Refuse("has no data_offsets");
    }
    return Enter(level_ == Level::kTop ? Level::kOutside : Level::kTop);
  }

  bool key(string_t& name) override {
    if (level_ == Level::kTop) return TopKey(name);
    if (level_ == Level::kMetadata) {
      return metadata_keys_.insert(name).second ||
             Fail(absl::StrCat("__metadata__ has the key '", Printable(name), "' twice"));
    }
    Entry& entry = entries.back();
    field_ = name;
    bool* seen = name == "dtype"          ? &entry.has_dtype
                 : name == "shape"        ? &entry.has_shape
                 : name == "data_offsets" ? &entry.has_offsets
                                          : nullptr;
    if (seen == nullptr) return Refuse(absl::StrCat("has the unknown field '", Printable(name), "'"));
    if (*seen) return Refuse(absl::StrCat("has the field ", name, " twice"));
    *seen = true;
    return true;
  }

  bool string(string_t& value) override {
    if (level_ == Level::kMetadata) return true;
    if (level_ != Level::kEntry || field_ != "dtype") return WrongValue();
    if (!BitsOf(value)) return Refuse(absl::StrCat("has the unknown dtype '", Printable(value), "'"));
    entries.back().tensor.dtype = value;
    return true;
  }

  bool start_array(std::size_t) override {
    if (level_ != Level::kEntry || field_ == "dtype") return WrongValue();
    return Enter(Level::kNumbers);
  }
  bool end_array() override {
    if (field_ == "data_offsets" && entries.back().offsets.size() != 2) return Refuse("must have two data_offsets");
    return Enter(Level::kEntry);
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (level_ != Level::kNumbers) return WrongValue();
    Entry& entry = entries.back();
    if (value > static_cast<uint64_t>(INT64_MAX)) return Refuse(absl::StrCat("has a ", field_, " over 63 bits"));
    if (field_ == "shape") {
      if (entry.tensor.shape.size() == kSafetensorsMaxDims)
        return Refuse(absl::StrCat("has more than ", kSafetensorsMaxDims, " dimensions"));
      entry.tensor.shape.push_back(static_cast<int64_t>(value));
    } else {
      if (entry.offsets.size() == 2) return Refuse("must have two data_offsets");
      entry.offsets.push_back(value);
    }
    return true;
  }

  bool null() override { return WrongValue(); }
  bool boolean(bool) override { return WrongValue(); }
  bool number_integer(number_integer_t) override { return WrongValue(); }  // a negative one
  bool number_float(number_float_t, const string_t&) override { return WrongValue(); }
  bool binary(binary_t&) override { return WrongValue(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("the header is not valid JSON at byte ", position));
  }

 private:
  enum class Level { kOutside, kTop, kMetadata, kEntry, kNumbers };

  bool Enter(Level level) {
    level_ = level;
    return true;
  }
  bool Fail(std::string text) {
    if (error.empty()) error = std::move(text);
    return false;
  }
  bool Refuse(const std::string& what) {
    if (entries.empty()) return Fail(absl::StrCat("the header ", what));
    return Fail(absl::StrCat("tensor ", Printable(entries.back().tensor.name), " ", what));
  }
  bool WrongValue() {
    if (level_ == Level::kMetadata) return Fail("__metadata__ must map strings to strings");
    if (level_ == Level::kTop && metadata_) return Fail("__metadata__ must be an object");
    if (level_ == Level::kEntry || level_ == Level::kNumbers) return Refuse(absl::StrCat("has a malformed ", field_));
    return Fail("the header must be an object of objects");
  }
  bool TopKey(const std::string& name) {
    if (!names_.insert(name).second) return Fail(absl::StrCat("tensor ", Printable(name), " appears twice"));
    metadata_ = name == "__metadata__";
    if (metadata_) return true;
    if (entries.size() == kSafetensorsMaxTensors) {
      return Fail(absl::StrCat("has more than ", Commas(kSafetensorsMaxTensors), " tensors, the most that are read"));
    }
    entries.emplace_back().tensor.name = name;
    return true;
  }

  Level level_ = Level::kOutside;
  bool metadata_ = false;
  std::string field_;
  absl::flat_hash_set<std::string> names_, metadata_keys_;
};

// Bytes that shape and dtype ask for; nullopt on overflow or a part of a byte.
std::optional<uint64_t> SizeOf(SafetensorsTensor& tensor) {
  tensor.elements = 1;
  for (const int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(tensor.elements, size, &tensor.elements)) return std::nullopt;
  }
  uint64_t bits = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(tensor.elements), *BitsOf(tensor.dtype), &bits) || bits % 8 != 0)
    return std::nullopt;
  return bits / 8;
}

absl::Status Place(const std::string& name, std::span<const std::byte> data, std::vector<Entry>& entries) {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.offsets < b.offsets; });
  uint64_t expected = 0;
  for (Entry& entry : entries) {
    const uint64_t begin = entry.offsets[0], end = entry.offsets[1];
    const std::string what = absl::StrCat(name, ": tensor ", Printable(entry.tensor.name));
    if (end < begin) return InvalidArgument(what, ": its data_offsets [", begin, ", ", end, "] run backwards");
    if (begin != expected) {
      return InvalidArgument(what, ": begins at byte ", Commas(begin),
                             " of the data, but the tensors before it end at ", Commas(expected),
                             begin > expected ? " (a hole)" : " (an overlap)");
    }
    const auto size = SizeOf(entry.tensor);
    if (!size) return InvalidArgument(what, ": its shape and dtype give no whole number of bytes, or one over 64 bits");
    if (*size != end - begin) {
      return InvalidArgument(what, ": its shape and dtype need ", Commas(*size), " bytes, but its data_offsets hold ",
                             Commas(end - begin));
    }
    if (end > data.size()) {
      return DataLoss(what, ": ends at byte ", Commas(end), " of the data, but the file has only ", Commas(data.size()),
                      "; the download is probably incomplete");
    }
    entry.tensor.bytes = data.subspan(begin, end - begin);
    expected = end;
  }
  if (expected != data.size()) {
    return InvalidArgument(name, ": ", Commas(data.size() - expected), " bytes behind the last tensor belong to none");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<SafetensorsTensor>> ParseSafetensors(const std::string& name,
                                                                std::span<const std::byte> bytes) {
  if (bytes.size() < 8)
    return DataLoss(name, ": has ", bytes.size(), " bytes; a safetensors file begins with 8 bytes of header length");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  if (header_bytes > kSafetensorsMaxHeaderBytes) {
    return InvalidArgument(name, ": says its header has ", Commas(header_bytes), " bytes; at most ",
                           Commas(kSafetensorsMaxHeaderBytes),
                           " are read: this is no safetensors file, or a damaged one");
  }
  if (header_bytes > bytes.size() - 8) {
    return DataLoss(name, ": the header needs ", Commas(header_bytes), " bytes, but the file ends ",
                    Commas(bytes.size() - 8), " bytes after its start; the download is probably incomplete");
  }
  const char* header = reinterpret_cast<const char*>(bytes.data()) + 8;
  if (header_bytes == 0 || header[0] != '{') return InvalidArgument(name, ": the header does not begin with '{'");
  if (const void* nul = std::memchr(header, 0, header_bytes)) {  // the JSON library would take it for the end
    return InvalidArgument(name, ": the header is not valid JSON at byte ", static_cast<const char*>(nul) - header + 1);
  }

  HeaderReader reader;
  const bool parsed = nlohmann::json::sax_parse(header, header + header_bytes, &reader);
  if (!parsed) return InvalidArgument(name, ": ", reader.error.empty() ? "the header is not valid JSON" : reader.error);
  DT_RETURN_IF_ERROR(Place(name, bytes.subspan(8 + header_bytes), reader.entries));

  std::vector<SafetensorsTensor> tensors;
  tensors.reserve(reader.entries.size());
  for (Entry& entry : reader.entries) tensors.push_back(std::move(entry.tensor));
  return tensors;
}

}  // namespace dovetail::model
