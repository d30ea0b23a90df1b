#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace dovetail {

// Sums of rows of floats that are the same bits in whatever order and parts the rows are added: each value becomes a
// whole number of 2^-64 first, and those are added as integers of 128 bits.
//   Exact: for values of 0 or of 2^-41 and more; smaller ones are cut to the next multiple of 2^-64 towards 0
//   Range: values below 2^40, and at most kMostRows of them
//   Threads: thread-compatible
class ExactSums {
 public:
  static constexpr size_t kWords = 2;  // of a sum on the wire
  static constexpr int64_t kMostRows = int64_t{1} << 22;

  // row: [n], the same n each time.
  // False, and the sums are not changed: a value is not finite, or out of range.
  bool Add(std::span<const float> row);

  // What other sums hold, as words() gave it.
  // False, and the sums are not changed: it is of another n.
  bool AddWords(std::span<const uint64_t> words);

  // [n][low, high], two's complement; empty before the first row.
  std::span<const uint64_t> words() const { return words_; }
  std::vector<uint64_t> TakeWords() { return std::move(words_); }
  bool empty() const { return words_.empty(); }

  // [n]: each sum divided by `rows`, rounded to the nearest double and then to a float.
  //   Requires: rows > 0
  std::vector<float> Mean(int64_t rows) const;

 private:
  std::vector<uint64_t> words_;
};

}  // namespace dovetail
