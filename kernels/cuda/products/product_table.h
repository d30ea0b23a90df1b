#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace dovetail::kernels::cuda {

// Which algorithm each product takes, kept from process to process: choices are made by time, and another choice may
// round otherwise, so that without the table a token at a near-tie could differ from start to start. A text file of one
// line a product, for one kind of GPU and one version of cuBLASLt, whose algorithms are bytes that only it understands.
// Threads: thread-compatible.
class ProductTable {
 public:
  static constexpr size_t kAlgorithmBytes = 64;
  static constexpr size_t kMostEntries = 4096;  // more are neither read nor kept
  using Algorithm = std::array<uint8_t, kAlgorithmBytes>;
  using Key = std::vector<int64_t>;

  // Reads the file if it is there; lines that are none are skipped. An empty path: nothing is kept.
  explicit ProductTable(std::string path);

  // Null: not chosen yet.
  const Algorithm* Find(const Key& key) const;
  // Keeps it, and writes the file anew with what others have added meanwhile, whose choices win. A file that cannot be
  // written costs nothing but the choice of the next start.
  void Add(const Key& key, const Algorithm& algorithm);

  // $XDG_CACHE_HOME/dovetail/, or ~/.cache/dovetail/, and a name made of `what`; empty if neither is set.
  static std::string DefaultPath(const std::string& what);

 private:
  void Read();
  const std::string path_;
  std::map<Key, Algorithm> entries_;
};

}  // namespace dovetail::kernels::cuda
