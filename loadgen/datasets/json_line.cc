#include "loadgen/datasets/json_line.h"

#include <utility>

namespace dovetail::loadgen {

absl::StatusOr<nlohmann::json> ParseJsonLine(const std::string& line, const std::string& place) {
  try {
    nlohmann::json row = nlohmann::json::parse(line);
    if (!row.is_object()) return InvalidArgument(place, ": is not a JSON object");
    return row;
  } catch (const nlohmann::json::parse_error& error) {
    const std::string what = error.what();
    const size_t text = what.find("syntax error");
    return InvalidArgument(place, ": is not JSON: byte ", error.byte, ": ",
                           text == std::string::npos ? what : what.substr(text));
  } catch (const nlohmann::json::exception& error) {  // numbers beyond a double
    const std::string what = error.what();
    return InvalidArgument(place, ": ", what.substr(what.find(']') + 2));
  }
}

}  // namespace dovetail::loadgen
