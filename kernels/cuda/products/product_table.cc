#include "kernels/cuda/products/product_table.h"

#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

namespace dovetail::kernels::cuda {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostKeyNumbers = 16;
constexpr char kDigits[] = "0123456789abcdef";

std::string ToHex(const ProductTable::Algorithm& bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

int DigitOf(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool FromHex(const std::string& text, ProductTable::Algorithm& bytes) {
  if (text.size() != 2 * bytes.size()) return false;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int high = DigitOf(text[2 * i]), low = DigitOf(text[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    bytes[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return true;
}

// "16 4096 4096 : 0a0b..."
bool Parse(const std::string& line, ProductTable::Key& key, ProductTable::Algorithm& algorithm) {
  std::istringstream words(line);
  std::string word;
  key.clear();
  while (words >> word && word != ":") {
    char* end = nullptr;
    key.push_back(std::strtoll(word.c_str(), &end, 10));
    if (*end != '\0' || key.size() > kMostKeyNumbers) return false;
  }
  std::string rest;
  return word == ":" && words >> word && !(words >> rest) && !key.empty() && FromHex(word, algorithm);
}

}  // namespace

ProductTable::ProductTable(std::string path) : path_(std::move(path)) { Read(); }

void ProductTable::Read() {
  if (path_.empty()) return;
  std::ifstream file(path_);
  std::string line;
  Key key;
  Algorithm algorithm;
  while (entries_.size() < kMostEntries && std::getline(file, line))
    if (Parse(line, key, algorithm)) entries_[key] = algorithm;
}

const ProductTable::Algorithm* ProductTable::Find(const Key& key) const {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

void ProductTable::Add(const Key& key, const Algorithm& algorithm) {
  if (entries_.size() >= kMostEntries) return;
  entries_[key] = algorithm;
  if (path_.empty()) return;
  Read();
  std::error_code ignored;
  fs::create_directories(fs::path(path_).parent_path(), ignored);
  const std::string fresh = path_ + "." + std::to_string(getpid());
  std::ofstream file(fresh, std::ios::trunc);
  for (const auto& [numbers, bytes] : entries_) {
    for (const int64_t number : numbers) file << number << ' ';
    file << ": " << ToHex(bytes) << '\n';
  }
  file.close();
  if (file) {
    fs::rename(fresh, path_, ignored);
  } else {
    fs::remove(fresh, ignored);
  }
}

std::string ProductTable::DefaultPath(const std::string& what) {
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  fs::path folder;
  if (cache != nullptr && *cache == '/') {
    folder = cache;
  } else if (home != nullptr && *home == '/') {
    folder = fs::path(home) / ".cache";
  } else {
    return {};
  }
  std::string name = "products";
  for (const char c : what) name.push_back(std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '-');
  return (folder / "dovetail" / name).string();
}

}  // namespace dovetail::kernels::cuda
