#include "server/cli/cors_flags.h"

#include "server/openai/json.h"

namespace dovetail::cli {
namespace {

absl::StatusOr<std::vector<std::string>> ParseList(const char* flag, const std::string& text) {
  std::vector<std::string> items;
  if (text.empty()) return items;
  const auto json = server::ParseJson(text);
  const auto wrong = [&] {
    return InvalidArgument(flag, ": '", text, "' is no JSON list of texts; quote it for the shell, as '[\"*\"]'");
  };
  if (!json.ok() || !json->is_array()) return wrong();
  for (const auto& item : *json) {
    if (!item.is_string()) return wrong();
    items.push_back(item.get<std::string>());
  }
  return items;
}

}  // namespace

void AddCorsFlags(CLI::App& command, CorsFlags& flags) {
  command
      .add_option("--allowed-origins", flags.origins,
                  "Web pages that may use the API from a browser: a JSON list of origins, as "
                  "'[\"https://chat.example.com\"]'; '[\"*\"]' lets every page. Else none may")
      ->type_name("JSON")
      ->group("API");
  command.add_option("--allowed-methods", flags.methods, "Methods that those pages may use, a JSON list")
      ->type_name("JSON")
      ->group("API");
  command.add_option("--allowed-headers", flags.headers, "Headers that those pages may send, a JSON list")
      ->type_name("JSON")
      ->group("API");
  command
      .add_flag("--allow-credentials", flags.credentials,
                "Those pages may use the browser's cookies and client certificates [off]")
      ->group("API");
}

absl::StatusOr<server::CorsOptions> CorsOptionsOf(const CorsFlags& flags) {
  server::CorsOptions options;
  DT_ASSIGN_OR_RETURN(options.origins, ParseList("--allowed-origins", flags.origins));
  DT_ASSIGN_OR_RETURN(options.methods, ParseList("--allowed-methods", flags.methods));
  DT_ASSIGN_OR_RETURN(options.headers, ParseList("--allowed-headers", flags.headers));
  options.credentials = flags.credentials;
  return options;
}

std::vector<std::string> ArgumentsOf(const CorsFlags& flags) {
  std::vector<std::string> arguments;
  if (!flags.origins.empty()) arguments = {"--allowed-origins", flags.origins};
  arguments.insert(arguments.end(), {"--allowed-methods", flags.methods, "--allowed-headers", flags.headers});
  if (flags.credentials) arguments.push_back("--allow-credentials");
  return arguments;
}

}  // namespace dovetail::cli
