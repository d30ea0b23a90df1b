#pragma once
#include <array>
#include <cstddef>
#include <optional>

namespace dovetail::scheduler {

// Seconds for a unit of work, from the last few measurements. Deterministic; of fixed size.
// Threads: thread-compatible; a value.
class RateEstimator {
 public:
  static constexpr size_t kKept = 15;
  // The last measurement is believed at once if it is so many times the median, or less than that part of it.
  static constexpr double kChanged = 1.5;

  // Measurements without work or time are left out.
  void Note(double work, double seconds);
  // The median, in which each measurement counts as much as its work: one that something disturbed changes little.
  // Nothing: nothing was measured.
  std::optional<double> usual() const;
  // What is to be expected next: the last measurement where the rate seems to have changed, else the median.
  std::optional<double> now() const;
  size_t measurements() const { return count_ < kKept ? count_ : kKept; }

 private:
  struct Measurement {
    double work = 0, seconds_per_unit = 0;
  };
  std::array<Measurement, kKept> kept_{};
  size_t count_ = 0;
};

}  // namespace dovetail::scheduler
