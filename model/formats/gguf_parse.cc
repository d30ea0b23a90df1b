#include "model/formats/gguf_parse.h"

#include <bit>
#include <cstring>

#include "absl/container/flat_hash_set.h"
#include "model/formats/file_errors.h"

namespace dovetail::model {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is read in place");

constexpr size_t kMaxTensorNameBytes = 63;
constexpr uint32_t kMaxDims = 4;
constexpr std::string_view kTruncated = "; the download is probably incomplete";

std::string Quoted(std::string_view text) { return absl::StrCat("'", Printable(text), "'"); }

// Bytes of a scalar; 0 for strings and arrays.
uint64_t ScalarBytes(GgufValueType type) {
  switch (type) {
    case GgufValueType::kU8:
    case GgufValueType::kI8:
    case GgufValueType::kBool: return 1;
    case GgufValueType::kU16:
    case GgufValueType::kI16: return 2;
    case GgufValueType::kU32:
    case GgufValueType::kI32:
    case GgufValueType::kF32: return 4;
    case GgufValueType::kU64:
    case GgufValueType::kI64:
    case GgufValueType::kF64: return 8;
    case GgufValueType::kString:
    case GgufValueType::kArray: return 0;
  }
  return 0;
}

class Parser {
 public:
  Parser(const std::string& name, std::span<const std::byte> bytes) : name_(name), bytes_(bytes) {}

  absl::StatusOr<GgufContents> Parse() {
    DT_RETURN_IF_ERROR(ReadHeader());
    DT_RETURN_IF_ERROR(ReadMetadata());
    DT_RETURN_IF_ERROR(ReadAlignment());
    DT_RETURN_IF_ERROR(ReadTensorInfos());
    DT_RETURN_IF_ERROR(PlaceTensors());
    return std::move(contents_);
  }

 private:
  template <typename... Args>
  absl::Status Bad(const Args&... args) const {
    return InvalidArgument(name_, ": ", args...);
  }

  uint64_t Left() const { return bytes_.size() - position_; }

  absl::Status Need(uint64_t wanted, const std::string& what) const {
    if (wanted <= Left()) return absl::OkStatus();
    return DataLoss(name_, ": ", what, " needs ", Commas(wanted), " bytes, but the file ends ", Commas(Left()),
                    " bytes after its start", absl::string_view(kTruncated.data(), kTruncated.size()));
  }

  template <typename T>
  absl::StatusOr<T> Read(const std::string& what) {
    DT_RETURN_IF_ERROR(Need(sizeof(T), what));
    T value;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  absl::StatusOr<std::string_view> ReadString(const std::string& what) {
    DT_ASSIGN_OR_RETURN(const uint64_t length, Read<uint64_t>(absl::StrCat("the length of ", what)));
    if (length > kGgufMaxStringBytes) {
      return Bad(what, " says it is ", Commas(length), " bytes long; at most ", Commas(kGgufMaxStringBytes),
                 " are read: the file is damaged");
    }
    DT_RETURN_IF_ERROR(Need(length, what));
    const std::string_view text(reinterpret_cast<const char*>(bytes_.data()) + position_, length);
    position_ += length;
    return text;
  }

  absl::Status ReadHeader() {
    DT_RETURN_IF_ERROR(Need(4, "the magic"));
    if (std::memcmp(bytes_.data(), "GGUF", 4) != 0) {
      return Bad("does not begin with 'GGUF': this is no GGUF file");
    }
    position_ = 4;
    DT_ASSIGN_OR_RETURN(contents_.version, Read<uint32_t>("the version"));
    if (contents_.version != 0 && (contents_.version & 0xffff) == 0) {
      return Unimplemented(name_, ": is big-endian; only little-endian GGUF is read, convert the model again");
    }
    if (contents_.version != 2 && contents_.version != 3) {
      return Unimplemented(name_, ": is GGUF version ", contents_.version,
                           "; versions 2 and 3 are read, convert the model again");
    }
    DT_ASSIGN_OR_RETURN(tensor_count_, Read<uint64_t>("the tensor count"));
    DT_ASSIGN_OR_RETURN(key_count_, Read<uint64_t>("the key count"));
    if (tensor_count_ > kGgufMaxTensors) {
      return Bad("says it has ", Commas(tensor_count_), " tensors; at most ", Commas(kGgufMaxTensors), " are read");
    }
    if (key_count_ > kGgufMaxKeys) {
      return Bad("says it has ", Commas(key_count_), " metadata keys; at most ", Commas(kGgufMaxKeys), " are read");
    }
    return absl::OkStatus();
  }

  absl::Status ReadMetadata() {
    absl::flat_hash_set<std::string_view> seen;
    for (uint64_t i = 0; i < key_count_; ++i) {
      DT_ASSIGN_OR_RETURN(const std::string_view key,
                          ReadString(absl::StrCat("metadata key ", i + 1, " of ", key_count_)));
      if (key.empty()) return Bad("metadata key ", i + 1, " of ", key_count_, " is empty");
      if (!seen.insert(key).second) return Bad("metadata key ", Quoted(key), " appears twice");
      DT_ASSIGN_OR_RETURN(const GgufValue value, ReadValue(absl::StrCat("metadata key ", Quoted(key))));
      contents_.metadata.emplace_back(key, value);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<GgufValueType> ReadValueType(const std::string& what) {
    DT_ASSIGN_OR_RETURN(const uint32_t id, Read<uint32_t>(absl::StrCat(what, ": the type")));
    if (id > static_cast<uint32_t>(GgufValueType::kF64)) return Bad(what, " has the unknown value type ", id);
    return static_cast<GgufValueType>(id);
  }

  absl::StatusOr<GgufValue> ReadValue(const std::string& what) {
    GgufValue value;
    DT_ASSIGN_OR_RETURN(value.type, ReadValueType(what));
    if (value.type == GgufValueType::kArray) return ReadArray(what);
    if (value.type == GgufValueType::kString) {
      DT_ASSIGN_OR_RETURN(const std::string_view text, ReadString(absl::StrCat(what, ": the string")));
      value.bytes = std::as_bytes(std::span(text.data(), text.size()));
      return value;
    }
    DT_ASSIGN_OR_RETURN(value.bytes, Take(ScalarBytes(value.type), absl::StrCat(what, ": the value")));
    if (value.type == GgufValueType::kBool) DT_RETURN_IF_ERROR(CheckBools(value.bytes, what));
    return value;
  }

  absl::StatusOr<GgufValue> ReadArray(const std::string& what) {
    GgufValue value;
    value.type = GgufValueType::kArray;
    DT_ASSIGN_OR_RETURN(value.element, ReadValueType(absl::StrCat(what, ": the array element")));
    if (value.element == GgufValueType::kArray) return Bad(what, " is an array of arrays, which is not read");
    DT_ASSIGN_OR_RETURN(value.count, Read<uint64_t>(absl::StrCat(what, ": the array length")));
    if (value.count > kGgufMaxArrayElements) {
      return Bad(what, " is an array of ", Commas(value.count), " elements; at most ", Commas(kGgufMaxArrayElements),
                 " are read");
    }
    if (value.element != GgufValueType::kString) {  // count <= 2^30 and 8 bytes: the product cannot overflow
      DT_ASSIGN_OR_RETURN(value.bytes, Take(value.count * ScalarBytes(value.element),
                                            absl::StrCat(what, ": an array of ", Commas(value.count), " elements")));
      if (value.element == GgufValueType::kBool) DT_RETURN_IF_ERROR(CheckBools(value.bytes, what));
      return value;
    }
    DT_RETURN_IF_ERROR(Need(value.count * 8, absl::StrCat(what, ": an array of ", Commas(value.count), " strings")));
    const uint64_t start = position_;
    for (uint64_t i = 0; i < value.count; ++i) DT_RETURN_IF_ERROR(SkipArrayString(what, i));
    value.bytes = bytes_.subspan(start, position_ - start);
    return value;
  }

  // Vocabularies have hundreds of thousands of strings: the text of an error is made only when there is one.
  absl::Status SkipArrayString(const std::string& what, uint64_t index) {
    uint64_t length = 0;
    if (Left() >= 8) std::memcpy(&length, bytes_.data() + position_, 8);
    if (Left() >= 8 && length <= kGgufMaxStringBytes && length <= Left() - 8) {
      position_ += 8 + length;
      return absl::OkStatus();
    }
    return ReadString(absl::StrCat(what, ": string ", index)).status();
  }

  absl::StatusOr<std::span<const std::byte>> Take(uint64_t count, const std::string& what) {
    DT_RETURN_IF_ERROR(Need(count, what));
    const auto taken = bytes_.subspan(position_, count);
    position_ += count;
    return taken;
  }

  absl::Status CheckBools(std::span<const std::byte> values, const std::string& what) const {
    for (const std::byte value : values) {
      if (value > std::byte{1})
        return Bad(what, " holds a bool of value ", static_cast<int>(value), "; only 0 and 1 are bools");
    }
    return absl::OkStatus();
  }

  absl::Status ReadAlignment() {
    for (const auto& [key, value] : contents_.metadata) {
      if (key != "general.alignment") continue;
      if (value.type != GgufValueType::kU32) {
        return Bad("general.alignment is not a u32");
      }
      std::memcpy(&contents_.alignment, value.bytes.data(), 4);
      if (!std::has_single_bit(contents_.alignment) || contents_.alignment > kGgufMaxAlignment) {
        return Bad("general.alignment is ", contents_.alignment, "; it must be a power of two up to ",
                   Commas(kGgufMaxAlignment));
      }
    }
    return absl::OkStatus();
  }

  absl::Status ReadTensorInfos() {
    absl::flat_hash_set<std::string_view> seen;
    for (uint64_t i = 0; i < tensor_count_; ++i) {
      GgufTensor tensor;
      DT_ASSIGN_OR_RETURN(tensor.name, ReadString(absl::StrCat("the name of tensor ", i + 1, " of ", tensor_count_)));
      const std::string what = absl::StrCat("tensor ", Printable(tensor.name));
      if (tensor.name.empty()) return Bad("the name of tensor ", i + 1, " of ", tensor_count_, " is empty");
      if (tensor.name.size() > kMaxTensorNameBytes) {
        return Bad(what, ": the name has ", tensor.name.size(), " bytes; at most ", kMaxTensorNameBytes,
                   " are allowed");
      }
      if (!seen.insert(tensor.name).second) return Bad(what, " appears twice");
      DT_RETURN_IF_ERROR(ReadDims(what, tensor));
      DT_RETURN_IF_ERROR(ReadType(what, tensor));
      DT_ASSIGN_OR_RETURN(const uint64_t offset, Read<uint64_t>(absl::StrCat(what, ": the offset")));
      offsets_.push_back(offset);
      contents_.tensors.push_back(std::move(tensor));
    }
    return absl::OkStatus();
  }

  absl::Status ReadDims(const std::string& what, GgufTensor& tensor) {
    DT_ASSIGN_OR_RETURN(const uint32_t dims, Read<uint32_t>(absl::StrCat(what, ": the number of dimensions")));
    if (dims < 1 || dims > kMaxDims) return Bad(what, " has ", dims, " dimensions; 1 to ", kMaxDims, " are allowed");
    tensor.elements = 1;
    for (uint32_t d = 0; d < dims; ++d) {
      DT_ASSIGN_OR_RETURN(const int64_t size, Read<int64_t>(absl::StrCat(what, ": dimension ", d)));
      if (size < 1) return Bad(what, ": dimension ", d, " is ", size, "; it must be at least 1");
      if (__builtin_mul_overflow(tensor.elements, size, &tensor.elements)) {
        return Bad(what, ": the product of its dimensions does not fit 63 bits");
      }
      tensor.dims.push_back(size);
    }
    return absl::OkStatus();
  }

  absl::Status ReadType(const std::string& what, GgufTensor& tensor) {
    DT_ASSIGN_OR_RETURN(const uint32_t id, Read<uint32_t>(absl::StrCat(what, ": the type")));
    const auto type = GgmlTypeFromId(id);
    if (!type) {
      return Unimplemented(name_, ": ", what, " is stored as ", GgmlTypeName(id),
                           "; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K are read: quantise the "
                           "model as one of them");
    }
    tensor.type = *type;
    if (tensor.dims[0] % BlockElements(*type) != 0) {
      return Bad(what, ": rows of ", Commas(tensor.dims[0]), " elements are not whole blocks of ", BlockElements(*type),
                 " (", GgmlTypeName(id), ")");
    }
    return absl::OkStatus();
  }

  // Tensors lie in the order of their infos, each beginning at the padded end of the one before.
  absl::Status PlaceTensors() {
    if (tensor_count_ == 0) return absl::OkStatus();
    const uint64_t padding = (contents_.alignment - position_ % contents_.alignment) % contents_.alignment;
    const uint64_t data_start = position_ + padding;
    uint64_t expected = 0;
    for (size_t i = 0; i < contents_.tensors.size(); ++i) {
      GgufTensor& tensor = contents_.tensors[i];
      const std::string what = absl::StrCat("tensor ", Printable(tensor.name));
      if (offsets_[i] != expected) {
        return Bad(what, ": begins at offset ", Commas(offsets_[i]), " of the data, but the tensors before it end at ",
                   Commas(expected));
      }
      const uint64_t blocks = static_cast<uint64_t>(tensor.elements / BlockElements(tensor.type));
      uint64_t size = 0;
      if (__builtin_mul_overflow(blocks, static_cast<uint64_t>(BlockBytes(tensor.type)), &size) || size >> 62 != 0) {
        return Bad(what, ": ", Commas(static_cast<uint64_t>(tensor.elements)),
                   " elements are more bytes than a file can have");
      }
      const uint64_t begin = data_start + expected;  // both below 2^63
      const uint64_t left = begin <= bytes_.size() ? bytes_.size() - begin : 0;
      if (size > left) {
        const std::string elements = Commas(static_cast<uint64_t>(tensor.elements));
        return DataLoss(name_, ": ", what, ": ", elements, " elements of ",
                        GgmlTypeName(static_cast<uint32_t>(tensor.type)), " need ", Commas(size),
                        " bytes, but the file ends ", Commas(left), " bytes after its start",
                        absl::string_view(kTruncated.data(), kTruncated.size()));
      }
      tensor.bytes = bytes_.subspan(begin, size);
      expected += size + (contents_.alignment - size % contents_.alignment) % contents_.alignment;
    }
    return absl::OkStatus();
  }

  const std::string& name_;
  const std::span<const std::byte> bytes_;
  uint64_t position_ = 0;
  uint64_t tensor_count_ = 0;
  uint64_t key_count_ = 0;
  std::vector<uint64_t> offsets_;
  GgufContents contents_;
};

}  // namespace

std::string_view Name(GgufValueType type) {
  constexpr std::string_view kNames[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                         "bool", "string", "array", "u64", "i64", "f64"};
  const auto index = static_cast<size_t>(type);
  return index < std::size(kNames) ? kNames[index] : std::string_view("unknown");
}

absl::StatusOr<GgufContents> ParseGguf(const std::string& name, std::span<const std::byte> bytes) {
  return Parser(name, bytes).Parse();
}

}  // namespace dovetail::model
