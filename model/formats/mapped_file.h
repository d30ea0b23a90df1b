#pragma once
#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace dovetail::model {

// A regular file mapped read-only for as long as the object lives. A process that truncates the file while it is mapped
// makes readers fault: model files are replaced by renaming, never rewritten in place.
// Threads: immutable.
class MappedFile {
 public:
  // Errors: kNotFound when there is no such file; kInvalidArgument for a folder, pipe or device; kPermissionDenied or
  // kInternal as the system says. Texts carry the base name only. Never blocks on a pipe.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& name() const { return name_; }  // base name, for error texts
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  MappedFile(std::string name, std::span<const std::byte> bytes) : name_(std::move(name)), bytes_(bytes) {}

  std::string name_;
  std::span<const std::byte> bytes_;
};

}  // namespace dovetail::model
