#include "server/grpc/zip_archive.h"

#include <array>

namespace dovetail::server {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEnd = 0x06054b50;
constexpr uint16_t kVersion = 20, kUtf8Names = 1 << 11, kStored = 0;
constexpr uint16_t kMidnight = 0, kFirstOfJanuary1980 = 0x21;
constexpr uint64_t kMaxArchive = 0xffffffff;

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0);
    table[byte] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = MakeTable();

template <typename T>
void Add(std::string& out, T value) {
  for (size_t byte = 0; byte < sizeof(T); ++byte) out += static_cast<char>((value >> (8 * byte)) & 0xff);
}

// What a file's two headers have in common.
void AddFile(std::string& out, const ArchivedFile& file, uint32_t checksum) {
  const auto size = static_cast<uint32_t>(file.bytes.size());
  Add(out, kUtf8Names);
  Add(out, kStored);
  Add(out, kMidnight);
  Add(out, kFirstOfJanuary1980);
  Add(out, checksum);
  Add(out, size);  // compressed
  Add(out, size);
  Add(out, static_cast<uint16_t>(file.name.size()));
  Add(out, uint16_t{0});  // extra fields
}

void AddCentral(std::string& out, const ArchivedFile& file, uint32_t checksum, uint32_t offset) {
  Add(out, kCentralHeader);
  Add(out, kVersion);  // made by
  Add(out, kVersion);  // needed
  AddFile(out, file, checksum);
  Add(out, uint16_t{0});  // comment
  Add(out, uint16_t{0});  // disk
  Add(out, uint16_t{0});  // internal attributes
  Add(out, uint32_t{0});  // external ones
  Add(out, offset);
  out += file.name;
}

}  // namespace

uint32_t ZipChecksum(std::string_view bytes) {
  uint32_t crc = 0xffffffffu;
  for (const char c : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

absl::StatusOr<std::string> ZipOf(const std::vector<ArchivedFile>& files) {
  if (files.size() > UINT16_MAX) return InvalidArgument(files.size(), " files are too many for an archive");
  std::string archive, central;
  for (const ArchivedFile& file : files) {
    if (file.name.size() > UINT16_MAX) return InvalidArgument("a file's name has ", file.name.size(), " bytes");
    if (archive.size() + central.size() + file.bytes.size() + 4 * file.name.size() + 256 > kMaxArchive)
      return InvalidArgument(file.name, ": the archive would have more than 4 GiB");
    const auto offset = static_cast<uint32_t>(archive.size());
    const uint32_t checksum = ZipChecksum(file.bytes);
    Add(archive, kLocalHeader);
    Add(archive, kVersion);
    AddFile(archive, file, checksum);
    archive += file.name;
    archive += file.bytes;
    AddCentral(central, file, checksum, offset);
  }
  const auto begin = static_cast<uint32_t>(archive.size());
  archive += central;
  const auto count = static_cast<uint16_t>(files.size());
  Add(archive, kEnd);
  Add(archive, uint16_t{0});  // this disk
  Add(archive, uint16_t{0});  // the central directory's
  Add(archive, count);
  Add(archive, count);
  Add(archive, static_cast<uint32_t>(central.size()));
  Add(archive, begin);
  Add(archive, uint16_t{0});  // comment
  return archive;
}

}  // namespace dovetail::server
