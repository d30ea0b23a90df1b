#include "transport/ucx/spent_descriptors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace dovetail::transport::ucx {
namespace {

constexpr const char* kName = "dovetail-spent";
constexpr std::time_t kKeptSeconds = 600;  // longer than any lease or stop after which an address is still believed

// Those whose link in /proc contains the text, in ascending order.
std::vector<int> DescriptorsOf(std::string_view text) {
  std::vector<int> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string number = entry.path().filename();
    const std::string link = std::filesystem::read_symlink(entry.path(), error);
    int fd = -1;
    std::from_chars(number.data(), number.data() + number.size(), fd);
    if (fd >= 0 && link.find(text) != std::string::npos) found.push_back(fd);
  }
  std::sort(found.begin(), found.end());
  return found;
}

void GiveBackOld() {
  for (const int fd : DescriptorsOf(kName)) {
    struct stat made;
    if (fstat(fd, &made) == 0 && std::time(nullptr) - made.st_ctime > kKeptSeconds) close(fd);
  }
}

}  // namespace

std::vector<int> SharedMemoryDescriptors() { return DescriptorsOf("ucx_shm_posix"); }

void KeepOutOfUse(const std::vector<int>& numbers) {
  GiveBackOld();
  if (numbers.empty()) return;
  const int spent = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (spent < 0) return;
  fcntl(spent, F_ADD_SEALS,
        F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);  // it cannot be mapped for writing
  for (const int number : numbers) {
    if (number == spent) continue;
    const int got = fcntl(spent, F_DUPFD_CLOEXEC, number);
    if (got >= 0 && got != number) close(got);  // in use
  }
  if (std::find(numbers.begin(), numbers.end(), spent) == numbers.end()) close(spent);
}

}  // namespace dovetail::transport::ucx
