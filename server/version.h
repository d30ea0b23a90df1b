#pragma once

namespace dovetail {

inline constexpr const char kVersion[] = "0.1.0";  // of the project, as in CMakeLists.txt

}  // namespace dovetail
