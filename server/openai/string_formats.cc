#include "server/openai/string_formats.h"

#include <map>

#include "absl/strings/str_cat.h"

namespace dovetail::server {
namespace {

using absl::StrCat;

std::string Date() {
  const std::string month31 = "(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])";
  const std::string month30 = "(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)";
  const std::string leap = "(?:[1-9]\\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29";
  return StrCat("(?:[1-9]\\d{3}-(?:", month31, "|", month30, "|02-(?:0[1-9]|1\\d|2[0-8]))|", leap, ")");
}

std::string Time() {
  const std::string hour = "(?:[01]\\d|2[0-3])";
  return StrCat(hour, ":[0-5]\\d:[0-5]\\d(?:\\.\\d{1,6})?(?:Z|[+\\-]", hour, ":[0-5]\\d)");
}

std::string Duration() {
  const std::string n = "\\d{1,4}";
  const std::string minutes = StrCat(n, "M(?:", n, "S)?"), months = StrCat(n, "M(?:", n, "D)?");
  const std::string time = StrCat("T(?:", n, "H(?:", minutes, ")?|", minutes, "|", n, "S)");
  const std::string date = StrCat("(?:", n, "Y(?:", months, ")?|", months, "|", n, "D)");
  return StrCat("P(?:", date, "(?:", time, ")?|", time, "|", n, "W)");
}

std::string Host(int more_labels_least) {
  const std::string label = "[a-zA-Z0-9](?:[a-zA-Z0-9\\-]{0,20}[a-zA-Z0-9])?";
  return StrCat(label, "(?:\\.", label, "){", more_labels_least, ",3}");
}

std::map<std::string, std::string, std::less<>> MakeFormats() {
  const std::string hex = "[0-9a-fA-F]";
  const std::string byte = "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)";
  const std::string atom = "[a-zA-Z0-9_+\\-]";
  return {{"date", Date()},
          {"time", Time()},
          {"date-time", StrCat(Date(), "T", Time())},
          {"duration", Duration()},
          {"uuid", StrCat(hex, "{8}(?:-", hex, "{4}){3}-", hex, "{12}")},
          {"ipv4", StrCat(byte, "(?:\\.", byte, "){3}")},
          {"ipv6", StrCat("(?:", hex, "{1,4}:){7}", hex, "{1,4}")},
          {"hostname", Host(0)},
          {"email", StrCat(atom, "{1,24}(?:\\.", atom, "{1,12}){0,3}@", Host(1))}};
}

const std::map<std::string, std::string, std::less<>>& Formats() {
  static const auto& formats = *new std::map<std::string, std::string, std::less<>>(MakeFormats());
  return formats;
}

}  // namespace

std::string RegexOfFormat(std::string_view format) {
  const auto found = Formats().find(format);
  return found == Formats().end() ? "" : found->second;
}

std::vector<std::string> EnforcedFormats() {
  std::vector<std::string> names;
  for (const auto& [name, regex] : Formats()) names.push_back(name);
  return names;
}

}  // namespace dovetail::server
