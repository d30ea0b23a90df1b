#pragma once
#include <string>
#include <string_view>

// Elements of pictures. Lengths are units of the picture's view box, which is kWidth wide.
// Threads: pure.

namespace dovetail::report::svg {

inline constexpr double kWidth = 480;
inline constexpr double kLetter = 6.6;  // about as wide as a letter is

std::string Number(double value);  // with two digits at most
double WidthOf(std::string_view text);

// <svg> with its title and description; `body` comes between.
std::string Picture(double height, const std::string& id, std::string_view title, std::string_view says,
                    std::string_view body);

// `anchor`: start, middle or end.
std::string Text(double x, double y, const char* anchor, const char* classes, std::string_view text);
std::string Line(double x1, double y1, double x2, double y2, const std::string& classes);
// A sign of its own for each colour, so that colour is not all that tells series apart. `says` may be empty.
std::string Sign(double x, double y, int color, std::string_view says);

}  // namespace dovetail::report::svg
