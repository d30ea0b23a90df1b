#include "server/cli/price_flags.h"

#include <cmath>

#include "absl/strings/numbers.h"
#include "server/cli/text_file.h"

namespace dovetail::cli {

void AddPriceFlags(CLI::App& command, PriceFlags& flags, const std::string& group) {
  command.add_option("--prices", flags.file, "Table of prices (prices/ of the project has one)")
      ->type_name("FILE")
      ->group(group);
  command.add_option("--price", flags.overrides, "In place of the table's")->type_name("DEVICE=USD")->group(group);
}

absl::StatusOr<plan::Catalogue> ReadPrices(const PriceFlags& flags) {
  plan::Catalogue catalogue{"--price", "now", {}};
  if (!flags.file.empty()) {
    DT_ASSIGN_OR_RETURN(const std::string text, ReadText(flags.file));
    DT_ASSIGN_OR_RETURN(catalogue, plan::ParseCatalogue(text, flags.file));
  } else if (flags.overrides.empty()) {
    return InvalidArgument("--prices: names no table of prices; the project has prices/2026-11-25.json");
  }
  for (const std::string& text : flags.overrides) {
    const size_t equals = text.find('=');
    double usd = 0;
    if (equals == std::string::npos || equals == 0 || !absl::SimpleAtod(text.substr(equals + 1), &usd) ||
        !std::isfinite(usd) || usd < 0)
      return InvalidArgument("--price: '", text, "' is not DEVICE=USD, as h100=2.10");
    catalogue.Override(text.substr(0, equals), usd);
  }
  return catalogue;
}

}  // namespace dovetail::cli
