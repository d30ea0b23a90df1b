#include "tests/support/test_data.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace dovetail::test {
namespace fs = std::filesystem;

std::optional<fs::path> TestData(const std::string& relative) {
  const char* root = std::getenv("DOVETAIL_TEST_DATA");
  if (root == nullptr || *root == '\0') return std::nullopt;
  fs::path path = fs::path(root) / relative;
  if (!fs::exists(path)) return std::nullopt;
  return path;
}

fs::path ProjectFile(const std::string& relative) {
  const char* moved = std::getenv("DOVETAIL_SOURCE_DIR");
  const fs::path root = moved == nullptr || *moved == '\0' ? DOVETAIL_SOURCE_DIR : moved;
  return root / relative;
}

fs::path ProjectData(const std::string& relative) { return ProjectFile("tests/data/" + relative); }

std::string ReadFile(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << "cannot read " << path;
  std::ostringstream out;
  out << in.rdbuf();
  return std::move(out).str();
}

namespace {
struct TempFolders {
  ~TempFolders() {
    for (const fs::path& path : paths) {
      std::error_code ignored;
      fs::remove_all(path, ignored);
    }
  }
  std::vector<fs::path> paths;
};
}  // namespace

fs::path TempFolder() {
  static TempFolders folders;
  std::string pattern = (fs::temp_directory_path() / "dovetail_test_XXXXXX").string();
  EXPECT_NE(mkdtemp(pattern.data()), nullptr);
  folders.paths.emplace_back(pattern);
  return pattern;
}

}  // namespace dovetail::test
