#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/status.h"
#include "model/formats/mapped_file.h"
#include "model/formats/safetensors_parse.h"

namespace dovetail::model {

// The safetensors weights of a model folder: model.safetensors, or the shards that model.safetensors.index.json names,
// mapped read-only. Tensor bytes live as long as the object.
// Threads: immutable.
class SafetensorsFile {
 public:
  // One file. Errors: ParseSafetensors's and MappedFile's.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::filesystem::path& path);

  // The weights in `folder`. Prefers the index when both are there. Besides the errors of the files: kNotFound when
  // there are no weights, kInvalidArgument for an index whose file names are not plain names in the folder, or that
  // does not agree with what the shards hold.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> OpenFolder(const std::filesystem::path& folder);

  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }
  const SafetensorsTensor* Find(std::string_view tensor) const;  // null if absent
  const std::string& shard_name(int shard) const { return shard_names_[static_cast<size_t>(shard)]; }

 private:
  SafetensorsFile() = default;
  absl::Status AddShard(const std::filesystem::path& path);
  absl::Status OpenShards(const std::filesystem::path& index);

  std::vector<std::unique_ptr<MappedFile>> files_;
  std::vector<std::string> shard_names_;
  std::vector<SafetensorsTensor> tensors_;
  absl::flat_hash_map<std::string, size_t> tensor_index_;
};

}  // namespace dovetail::model
