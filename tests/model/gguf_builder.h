#pragma once
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/formats/ggml_types.h"
#include "model/formats/gguf_parse.h"

namespace dovetail::model::test {

// Little-endian bytes of a GGUF file, written field by field, so that a test can write any of them wrongly.
class GgufBuilder {
 public:
  std::string magic = "GGUF";
  uint32_t version = 3;
  uint64_t alignment = 32;  // of the data that this builder writes; say it in the metadata too if it is not 32
  // Set to lie about the counts; otherwise what was added is counted.
  std::optional<uint64_t> tensor_count, key_count;

  template <typename T>
  static std::string Raw(T value) {
    std::string bytes(sizeof(T), '\0');
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
  }
  static std::string Raw(GgufValueType type) { return Raw(static_cast<uint32_t>(type)); }
  static std::string String(const std::string& text) { return Raw<uint64_t>(text.size()) + text; }

  // A key whose type id and value bytes are given as they shall stand in the file.
  GgufBuilder& Key(const std::string& key, uint32_t type, const std::string& value) {
    metadata_ += String(key) + Raw(type) + value;
    ++keys_;
    return *this;
  }
  GgufBuilder& U32(const std::string& key, uint32_t value) { return Key(key, 4, Raw(value)); }
  GgufBuilder& U64(const std::string& key, uint64_t value) { return Key(key, 10, Raw(value)); }
  GgufBuilder& F32(const std::string& key, float value) { return Key(key, 6, Raw(value)); }
  GgufBuilder& Bool(const std::string& key, bool value) { return Key(key, 7, std::string(1, value ? '\1' : '\0')); }
  GgufBuilder& Text(const std::string& key, const std::string& value) { return Key(key, 8, String(value)); }
  GgufBuilder& Strings(const std::string& key, const std::vector<std::string>& values) {
    std::string bytes = Raw<uint32_t>(8) + Raw<uint64_t>(values.size());
    for (const std::string& value : values) bytes += String(value);
    return Key(key, 9, bytes);
  }
  GgufBuilder& I32s(const std::string& key, const std::vector<int32_t>& values) {
    std::string bytes = Raw<uint32_t>(5) + Raw<uint64_t>(values.size());
    for (const int32_t value : values) bytes += Raw(value);
    return Key(key, 9, bytes);
  }

  // A tensor info with any content; `data` is appended padded.
  GgufBuilder& Info(const std::string& name, const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset,
                    const std::string& data = "") {
    infos_ += String(name) + Raw<uint32_t>(static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) infos_ += Raw(dim);
    infos_ += Raw(type) + Raw(offset);
    data_ += data;
    if (!data.empty()) data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    ++tensors_;
    return *this;
  }
  // A well-formed tensor of `data`; dims innermost first.
  GgufBuilder& Tensor(const std::string& name, const std::vector<uint64_t>& dims, GgmlType type,
                      const std::string& data) {
    return Info(name, dims, static_cast<uint32_t>(type), data_.size(), data);
  }
  GgufBuilder& Tensor(const std::string& name, const std::vector<uint64_t>& dims, std::span<const float> values) {
    return Tensor(name, dims, GgmlType::kF32,
                  std::string(reinterpret_cast<const char*>(values.data()), values.size_bytes()));
  }

  std::string Header() const {
    return magic + Raw(version) + Raw(tensor_count.value_or(tensors_)) + Raw(key_count.value_or(keys_)) + metadata_ +
           infos_;
  }
  std::string Build() const {
    std::string bytes = Header();
    if (!data_.empty()) bytes.resize((bytes.size() + alignment - 1) / alignment * alignment);
    return bytes + data_;
  }

 private:
  std::string metadata_, infos_, data_;
  uint64_t keys_ = 0, tensors_ = 0;
};

}  // namespace dovetail::model::test
