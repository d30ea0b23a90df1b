#include "model/formats/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "model/formats/file_errors.h"

namespace dovetail::model {
namespace {

struct FileDescriptor {
  explicit FileDescriptor(int opened) : value(opened) {}
  ~FileDescriptor() {
    if (value >= 0) close(value);
  }
  int value;
};

absl::Status SystemError(const std::string& name, int error) {
  const std::string text = absl::StrCat(name, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(absl::StrCat(name, ": no such file"));
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(text);
  return absl::InternalError(text);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MappedFile>> MappedFile::Open(const std::filesystem::path& path) {
  std::string name = BaseName(path);
  // O_NONBLOCK: opening a pipe must not wait for a writer. It means nothing for a regular file.
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.value < 0) return SystemError(name, errno);
  struct stat status {};
  if (fstat(file.value, &status) != 0) return SystemError(name, errno);
  if (!S_ISREG(status.st_mode)) return InvalidArgument(name, ": is not a regular file");

  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) return std::unique_ptr<MappedFile>(new MappedFile(std::move(name), {}));  // mmap refuses length 0
  void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.value, 0);
  if (address == MAP_FAILED) return SystemError(name, errno);
  return std::unique_ptr<MappedFile>(new MappedFile(std::move(name), {static_cast<const std::byte*>(address), size}));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace dovetail::model
