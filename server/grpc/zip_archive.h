#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace dovetail::server {

struct ArchivedFile {
  std::string name;  // relative, with '/'
  std::string bytes;
};

// The files as they are (stored, not compressed) in one ZIP archive, all with the date of 1 January 1980, so that the
// same files give the same bytes.
// Errors: kInvalidArgument: more than 65,535 files, a name of more than 65,535 bytes, or 4 GiB in all.
// Threads: pure
// Source:  PKWARE's APPNOTE 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16.
absl::StatusOr<std::string> ZipOf(const std::vector<ArchivedFile>& files);

// CRC-32 as ZIP has it (ISO 3309, reflected, 0xEDB88320). Pure.
uint32_t ZipChecksum(std::string_view bytes);

}  // namespace dovetail::server
