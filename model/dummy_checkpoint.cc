#include "model/dummy_checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "model/families/checkpoint_tensors.h"
#include "model/formats/json_file.h"

namespace dovetail::model {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kBytes = 2;  // of a bf16 element

// Gone, with what it holds, when this goes. Files that are mapped stay.
class TemporaryFolder {
 public:
  static absl::StatusOr<TemporaryFolder> Create() {
    std::error_code error;
    std::string pattern = (fs::temp_directory_path(error) / "dovetail-dummy-XXXXXX").string();
    if (error || mkdtemp(pattern.data()) == nullptr)
      return ResourceExhausted("--load-format dummy: no folder can be made in ", pattern);
    return TemporaryFolder(pattern);
  }
  TemporaryFolder(TemporaryFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  explicit TemporaryFolder(fs::path path) : path_(std::move(path)) {}
  fs::path path_;
};

// A safetensors file of all tensors that the config asks for, its data a hole.
absl::Status WriteWeights(const ModelConfig& config, const fs::path& file) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  int64_t bytes = 0;
  for (const TensorNeed& need : TensorsOf(config)) {
    if (header.contains(need.hf)) continue;  // tied, or a part of a fused one
    nlohmann::ordered_json shape = {need.stored_rows};
    if (need.cols > 0) shape.push_back(need.cols);
    const int64_t size = need.stored_rows * std::max<int64_t>(need.cols, 1) * kBytes;
    header[need.hf] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {bytes, bytes + size}}};
    bytes += size;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::ofstream out(file, std::ios::binary);
  for (int i = 0; i < 8; ++i) out.put(static_cast<char>(length >> (8 * i)));
  out << text;
  out.close();
  std::error_code error;
  if (out) fs::resize_file(file, 8 + length + static_cast<uint64_t>(bytes), error);
  if (!out || error) return ResourceExhausted("--load-format dummy: ", file.string(), " cannot be written");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenDummyCheckpoint(const fs::path& folder) {
  DT_ASSIGN_OR_RETURN(const nlohmann::json config_json, ReadJsonFile(folder / "config.json"));
  DT_ASSIGN_OR_RETURN(const ModelConfig config, ConfigFromJson("config.json", config_json, nullptr));
  DT_ASSIGN_OR_RETURN(const TemporaryFolder temporary, TemporaryFolder::Create());
  const fs::path path = folder.has_filename() ? folder : folder.parent_path();
  const fs::path model = temporary.path() / path.filename();  // which names the model
  std::error_code error;
  fs::create_directory(model, error);
  if (!error) fs::copy_file(folder / "config.json", model / "config.json", error);
  if (error) return ResourceExhausted("--load-format dummy: ", model.string(), ": ", error.message());
  DT_RETURN_IF_ERROR(WriteWeights(config, model / "model.safetensors"));
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Checkpoint> checkpoint, OpenCheckpoint(model));
  checkpoint->set_folder(folder);
  return checkpoint;
}

}  // namespace dovetail::model
