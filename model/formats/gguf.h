#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/status.h"
#include "model/formats/gguf_parse.h"
#include "model/formats/mapped_file.h"

namespace dovetail::model {

// A GGUF model: one file, or all parts of a split one, mapped read-only. Every view that it gives (names, strings,
// tensor bytes) lives as long as the object.
//
// Metadata accessors give nullopt for an absent key, and kInvalidArgument naming file, key, wanted and found type for a
// key of another type. Integers may be stored in any width; a value outside int64 is refused.
// Threads: immutable.
class GgufFile {
 public:
  // Opens `path`, and for "<name>-00001-of-000NN.gguf" the NN - 1 other parts in its folder. Errors: ParseGguf's,
  // MappedFile's, and kInvalidArgument for a part other than the first, or parts that do not belong together.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Open(const std::filesystem::path& path);

  // One file's bytes in memory, which must outlive the result; `name` appears in error texts. For tests and fuzzing.
  static absl::StatusOr<std::unique_ptr<GgufFile>> FromBytes(const std::string& name, std::span<const std::byte> bytes);

  // Base name of the (first) file.
  const std::string& name() const { return part_names_.front(); }
  const std::string& part_name(int part) const { return part_names_[static_cast<size_t>(part)]; }
  uint32_t version() const { return version_; }

  // In file order, parts one after another.
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* FindTensor(std::string_view tensor) const;  // null if absent

  // Keys in file order (the first part's: metadata lives there).
  const std::vector<std::pair<std::string_view, GgufValue>>& metadata() const { return metadata_; }
  const GgufValue* Find(std::string_view key) const;  // null if absent

  absl::StatusOr<std::optional<int64_t>> Int(std::string_view key) const;
  absl::StatusOr<std::optional<double>> Float(std::string_view key) const;  // f32, f64 or any integer
  absl::StatusOr<std::optional<bool>> Bool(std::string_view key) const;
  absl::StatusOr<std::optional<std::string_view>> String(std::string_view key) const;
  absl::StatusOr<std::optional<std::vector<int64_t>>> Ints(std::string_view key) const;  // bools count as integers
  absl::StatusOr<std::optional<std::vector<float>>> Floats(std::string_view key) const;
  absl::StatusOr<std::optional<std::vector<std::string_view>>> Strings(std::string_view key) const;

 private:
  GgufFile() = default;
  absl::Status Add(const std::string& name, GgufContents contents);
  absl::Status OpenOtherParts(const std::filesystem::path& first);
  absl::Status WrongType(std::string_view key, std::string_view wanted, const GgufValue& found) const;

  std::vector<std::unique_ptr<MappedFile>> files_;
  std::vector<std::string> part_names_;
  uint32_t version_ = 0;
  std::vector<std::pair<std::string_view, GgufValue>> metadata_;
  std::vector<GgufTensor> tensors_;
  absl::flat_hash_map<std::string_view, size_t> tensor_index_;
  absl::flat_hash_map<std::string_view, size_t> key_index_;
};

}  // namespace dovetail::model
