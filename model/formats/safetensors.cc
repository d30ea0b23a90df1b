#include "model/formats/safetensors.h"

#include <map>
#include <set>

#include "model/formats/file_errors.h"
#include "model/formats/json_file.h"

namespace dovetail::model {
namespace fs = std::filesystem;
namespace {

constexpr size_t kMaxShards = 1024;
constexpr char kSingle[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";

// An index may name only files of its own folder.
bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\\') == std::string::npos && name.find('\0') == std::string::npos;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const fs::path& path) {
  std::unique_ptr<SafetensorsFile> result(new SafetensorsFile());
  DT_RETURN_IF_ERROR(result->AddShard(path));
  return result;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::OpenFolder(const fs::path& folder) {
  std::error_code ignored;
  std::unique_ptr<SafetensorsFile> result(new SafetensorsFile());
  if (fs::exists(folder / kIndex, ignored)) {
    DT_RETURN_IF_ERROR(result->OpenShards(folder / kIndex));
    return result;
  }
  if (fs::exists(folder / kSingle, ignored)) return Open(folder / kSingle);
  return NotFound(BaseName(folder), ": has neither ", kSingle, " nor ", kIndex,
                  "; download the safetensors files of the model");
}

absl::Status SafetensorsFile::AddShard(const fs::path& path) {
  DT_ASSIGN_OR_RETURN(auto file, MappedFile::Open(path));
  DT_ASSIGN_OR_RETURN(auto tensors, ParseSafetensors(file->name(), file->bytes()));
  const int shard = static_cast<int>(files_.size());
  shard_names_.push_back(file->name());
  files_.push_back(std::move(file));
  for (SafetensorsTensor& tensor : tensors) {
    tensor.shard = shard;
    const auto [it, inserted] = tensor_index_.emplace(tensor.name, tensors_.size());
    if (!inserted) {
      return InvalidArgument(shard_names_.back(), ": tensor ", Printable(tensor.name), " is also in ",
                             shard_name(tensors_[it->second].shard));
    }
    tensors_.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsFile::OpenShards(const fs::path& index) {
  DT_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(index));
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (map == json.end() || !map->is_object()) return InvalidArgument(kIndex, ": has no weight_map object");
  std::set<std::string> shards;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string() || !IsPlainFileName(file.get_ref<const std::string&>())) {
      return InvalidArgument(kIndex, ": weight_map['", Printable(tensor),
                             "'] must be the plain name of a file in the same folder, without separators");
    }
    shards.insert(file.get_ref<const std::string&>());
  }
  if (shards.size() > kMaxShards)
    return InvalidArgument(kIndex, ": names ", shards.size(), " files; at most ", kMaxShards, " are read");
  for (const std::string& shard : shards) {
    if (absl::Status status = AddShard(index.parent_path() / shard); !status.ok()) return Annotate(status, kIndex);
  }
  for (const auto& [tensor, file] : map->items()) {
    const SafetensorsTensor* found = Find(tensor);
    if (found == nullptr || shard_name(found->shard) != file.get_ref<const std::string&>()) {
      return InvalidArgument(kIndex, ": says that tensor ", Printable(tensor), " is in ",
                             Printable(file.get_ref<const std::string&>()),
                             ", which does not hold it; the files are of different models");
    }
  }
  return absl::OkStatus();
}

const SafetensorsTensor* SafetensorsFile::Find(std::string_view tensor) const {
  const auto it = tensor_index_.find(std::string(tensor));
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

}  // namespace dovetail::model
