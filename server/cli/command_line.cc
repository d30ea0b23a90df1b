#include "server/cli/command_line.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace dovetail::cli {
namespace {

constexpr size_t kColumn = 34, kWidth = 100;

std::string Ending(const std::string& remedy) { return remedy.empty() ? "" : absl::StrCat("; ", remedy); }

// What a shell user sees of an argument: short, on one line.
std::string Quoted(const std::string& text) {
  std::string shown;
  for (const char c : text.substr(0, 60)) shown += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return absl::StrCat("'", shown, text.size() > 60 ? "..." : "", "'");
}

size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// Whether the dashed words of `text`, at least two, are words of `name`, in that order.
bool HasWordsOf(const std::string& name, const std::string& text) {
  const std::vector<std::string> wanted = absl::StrSplit(text, '-', absl::SkipEmpty());
  size_t found = 0;
  for (const auto word : absl::StrSplit(name, '-'))
    if (found < wanted.size() && word == wanted[found]) ++found;
  return wanted.size() >= 2 && found == wanted.size();
}

// vLLM's flags that mean something here under another name, or nothing.
std::string HintForVllms(const std::string& flag) {
  constexpr std::pair<const char*, const char*> kHints[] = {
      {"--model", "the model is the argument behind the command, as in `dovetail serve MODEL`"},
      {"--tensor-parallel-size",
       "layers are not cut over GPUs here; --compute-workers and --attention-devices (of `up`) spread the work"},
      {"-tp", "layers are not cut over GPUs here; --compute-workers and --attention-devices (of `up`) spread the work"},
      {"--pipeline-parallel-size",
       "layers are not divided over GPUs here; --compute-workers and --attention-devices (of `up`) spread the work"},
      {"--data-parallel-size", "start a server for each copy of the model, behind a gateway"},
      {"--gpu-memory-utilization",
       "the KV cache takes what is free; --kv-cache-memory-bytes (of a worker: --kv-capacity) sets its size"},
      {"--enforce-eager", "recorded steps are used where they help; there is nothing to switch off"},
      {"--trust-remote-code", "no code of a model is ever run"},
      {"--quantization", "weights stay as the file has them; --gpu-weights says what a GPU does with 4 and 8 bits"},
      {"--swap-space", "sequences that give way are computed again; nothing is swapped"},
      {"--tokenizer", "the tokenizer is the one that lies with the model"}};
  for (const auto& [name, hint] : kHints)
    if (flag == name) return hint;
  return "";
}

std::string Wrapped(const std::string& text, size_t indent) {
  std::string out;
  size_t column = indent;
  for (const auto word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    if (column > indent && column + 1 + word.size() > kWidth) {
      absl::StrAppend(&out, "\n", std::string(indent, ' '));
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    absl::StrAppend(&out, word);
    column += word.size();
  }
  return out;
}

class TwoColumns : public CLI::Formatter {
 public:
  TwoColumns() { column_width(kColumn); }

  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    if (positional) return option->get_name(/*positional=*/true);
    std::vector<std::string> names;
    for (const std::string& name : option->get_snames()) names.push_back(absl::StrCat("-", name));
    for (const std::string& name : option->get_lnames()) names.push_back(absl::StrCat("--", name));
    return absl::StrJoin(names, ", ");
  }

  std::string make_option(const CLI::Option* option, bool positional) const override {
    std::string left = absl::StrCat("  ", make_option_name(option, positional));
    if (!positional && option->get_type_size() != 0 && !option->get_type_name().empty())
      absl::StrAppend(&left, " ", option->get_type_name());
    std::string text = option->get_description();
    if (!option->get_default_str().empty() && option->get_default_str() != "[]")
      absl::StrAppend(&text, " [", option->get_default_str(), "]");
    const std::string gap = left.size() + 2 > kColumn ? absl::StrCat("\n", std::string(kColumn, ' '))
                                                      : std::string(kColumn - left.size(), ' ');
    return absl::StrCat(left, gap, Wrapped(text, kColumn), "\n");
  }
  std::string make_group(std::string group, bool positional, std::vector<const CLI::Option*> options) const override {
    const bool first = positional || group == get_label("Options");  // groups already have a line between them
    std::string out = absl::StrCat(first ? "\n" : "", positional ? "Arguments" : group, ":\n");
    for (const CLI::Option* option : options) out += make_option(option, positional);
    return out;
  }
  std::string make_subcommand(const CLI::App* command) const override {
    const std::string left = absl::StrCat("  ", command->get_name());
    return absl::StrCat(left, std::string(kColumn - left.size(), ' '), Wrapped(command->get_description(), kColumn),
                        "\n");
  }
  std::string make_subcommands(const CLI::App* app, CLI::AppFormatMode) const override {
    const auto commands = app->get_subcommands({});
    std::string out = commands.empty() ? "" : "\nCommands:\n";
    for (const CLI::App* command : commands) out += make_subcommand(command);
    return out;
  }
  std::string make_usage(const CLI::App* command, std::string name) const override {
    std::string out = absl::StrCat("\nUsage: ", name);
    const bool has_positionals =
        !command->get_options([](const CLI::Option* o) { return o->get_positional(); }).empty();
    if (!command->get_subcommands({}).empty() && !has_positionals) return absl::StrCat(out, " COMMAND ...\n");
    for (const CLI::Option* positional : command->get_options([](const CLI::Option* o) { return o->get_positional(); }))
      absl::StrAppend(&out, " ", make_option_usage(positional));
    return absl::StrCat(out, " [flags]\n");
  }
};

std::vector<std::string> FlagsOf(const CLI::App& command) {
  std::vector<std::string> flags;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) flags.push_back(absl::StrCat("--", name));
  return flags;
}

// How often "--flag" or "--flag=value" is among the arguments.
int TimesGiven(const std::string& flag, int argc, char** argv) {
  const std::string with_value = flag + "=";
  return static_cast<int>(std::count_if(argv, argv + argc, [&](const std::string_view argument) {
    return argument == flag || argument.substr(0, with_value.size()) == with_value;
  }));
}

// The first argument that looks like a flag and is none.
std::string UnknownFlag(const CLI::App& command, int argc, char** argv) {
  const std::vector<std::string> known = FlagsOf(command);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--") break;
    if (argument.size() < 2 || argument[0] != '-') continue;
    const std::string name = argument.substr(0, argument.find('='));
    if (name == "-h" || std::find(known.begin(), known.end(), name) != known.end()) continue;
    if (name.size() > 1 && (std::isdigit(static_cast<unsigned char>(name[1])) != 0 || name[1] == '.')) continue;  // -1
    return name;
  }
  return "";
}

}  // namespace

CLI::Validator WholeNumber(int64_t min, int64_t max, const std::string& remedy) {
  return CLI::Validator(
      [=](const std::string& text) -> std::string {
        int64_t value = 0;
        const bool digits = !text.empty() && text.find_first_not_of("+-0123456789") == std::string::npos;
        if (!digits)
          return absl::StrCat(Quoted(text), " is not a whole number; give one in ", min, "..", max, Ending(remedy));
        if (absl::SimpleAtoi(text, &value) && value >= min && value <= max) return "";
        return absl::StrCat(text.substr(0, 30), " is outside ", min, "..", max, Ending(remedy));
      },
      "");
}

CLI::Validator Number(double min, double max, const std::string& remedy) {
  return CLI::Validator(
      [=](const std::string& text) -> std::string {
        double value = 0;
        if (!absl::SimpleAtod(text, &value) || !std::isfinite(value))
          return absl::StrCat(Quoted(text), " is not a number; give one in ", min, "..", max, Ending(remedy));
        if (value >= min && value <= max) return "";
        return absl::StrCat(text.substr(0, 30), " is outside ", min, "..", max, Ending(remedy));
      },
      "");
}

CLI::Validator OneOf(const std::vector<std::string>& names) {
  return CLI::Validator(
      [=](const std::string& text) -> std::string {
        if (std::find(names.begin(), names.end(), text) != names.end()) return "";
        return absl::StrCat(Quoted(text), " is none of ", absl::StrJoin(names, ", "));
      },
      "");
}

std::shared_ptr<CLI::FormatterBase> HelpFormatter() { return std::make_shared<TwoColumns>(); }

std::string NearestName(const std::string& text, const std::vector<std::string>& names) {
  std::string nearest;
  size_t least = std::max<size_t>(2, text.size() / 3) + 1;
  for (const std::string& name : names) {
    const bool begins = text.size() >= 3 && name.compare(0, text.size(), text) == 0;
    const size_t distance = begins || HasWordsOf(name, text) ? 1 : EditDistance(text, name);
    if (distance >= least) continue;
    least = distance;
    nearest = name;
  }
  return nearest;
}

std::string ExplainUsage(const CLI::App& app, int argc, char** argv, const CLI::ParseError& error) {
  std::vector<std::string> commands;
  const CLI::App* command = nullptr;
  for (const CLI::App* one : app.get_subcommands({})) {
    commands.push_back(one->get_name());
    if (argc > 1 && one->get_name() == argv[1]) command = one;
  }
  const auto suggest = [](const std::string& nearest, const std::string& otherwise) {
    return nearest.empty() ? otherwise : absl::StrCat("did you mean ", nearest, "?");
  };
  if (argc < 2) return absl::StrCat("say what to do: ", absl::StrJoin(commands, ", "), "; `dovetail --help` explains");
  if (command == nullptr) {
    const std::string name = argv[1];
    const bool flag = name[0] == '-';
    return absl::StrCat(
        "there is no ", flag ? "flag " : "command ", Quoted(name), flag ? " before the command; " : "; ",
        suggest(flag ? "" : NearestName(name, commands), absl::StrCat("there are ", absl::StrJoin(commands, ", "))));
  }
  std::string name = command->get_name();
  int words = 1;
  for (const CLI::App* one : command->get_subcommands({})) {
    if (argc <= 2 || one->get_name() != argv[2]) continue;
    command = one;
    absl::StrAppend(&name, " ", one->get_name());
    words = 2;
    break;
  }
  const std::string help = absl::StrCat("`dovetail ", name, " --help` lists them");
  if (const std::string flag = UnknownFlag(*command, argc - words, argv + words); !flag.empty()) {
    if (const std::string hint = HintForVllms(flag); !hint.empty())
      return absl::StrCat(name, ": there is no flag ", flag, ": ", hint);
    return absl::StrCat(name, ": there is no flag ", flag, "; ", suggest(NearestName(flag, FlagsOf(*command)), help));
  }
  std::string what = error.what();
  what = what.substr(0, what.find('\n'));
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr)
    what = absl::StrCat("there are more arguments than this command takes; ", help);
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    const std::string flag = what.substr(0, what.find(':'));
    const int times = TimesGiven(flag, argc, argv);
    what = times > 1 ? absl::StrCat(flag, " is given ", times, " times; give it once")
                     : absl::StrCat(flag, " needs a value");
  }
  return absl::StrCat(name, ": ", what);
}

}  // namespace dovetail::cli
