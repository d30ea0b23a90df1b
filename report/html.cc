#include "report/html.h"

#include "absl/strings/str_cat.h"
#include "report/charts.h"
#include "report/escape.h"
#include "report/style.h"

namespace dovetail::report {
namespace {

constexpr const char* kHead = R"(<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
)";

std::string Element(const char* name, const std::string& text, const char* classes = "") {
  if (text.empty()) return "";
  const std::string attribute = *classes == '\0' ? std::string() : absl::StrCat(" class=\"", classes, "\"");
  return absl::StrCat("<", name, attribute, ">", Escaped(text), "</", name, ">\n");
}

std::string TableOf(const Figure& figure) {
  const Table& table = figure.table;
  if (table.rows.empty()) return "";
  std::string out =
      absl::StrCat("<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"Numbers: ", Escaped(figure.title),
                   "\"><table><thead><tr>");
  for (const std::string& name : table.head) absl::StrAppend(&out, "<th scope=\"col\">", Escaped(name), "</th>");
  out += "</tr></thead><tbody>\n";
  for (const auto& row : table.rows) {
    out += "<tr>";
    for (size_t i = 0; i < row.size(); ++i)
      absl::StrAppend(&out, i == 0 ? "<th scope=\"row\">" : "<td>", Escaped(row[i]), i == 0 ? "</th>" : "</td>");
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

template <typename Chart>
std::string ChartsOf(const std::vector<Chart>& charts, const std::string& id, const std::string& says) {
  std::string out;
  for (size_t i = 0; i < charts.size(); ++i)
    absl::StrAppend(&out, "<figure>", Element("h3", charts[i].title),
                    SvgOf(charts[i], absl::StrCat(id, "-", i), absl::StrCat(says, " The table below has the numbers.")),
                    LegendOf(charts[i]), "</figure>\n");
  return out;
}

std::string SectionOf(const Figure& figure, const std::string& id) {
  return absl::StrCat("<section id=\"", id, "\">", Element("h2", figure.title), Element("p", figure.says, "says"),
                      "<div class=\"charts\">\n", ChartsOf(figure.charts, id + "-chart", figure.says),
                      ChartsOf(figure.bars, id + "-bars", figure.says), "</div>\n", TableOf(figure), "</section>\n");
}

std::string FactsOf(const Report& report) {
  if (report.facts.empty()) return "";
  std::string out = "<dl>";
  for (const auto& [name, value] : report.facts)
    absl::StrAppend(&out, "<div><dt>", Escaped(name), "</dt><dd>", Escaped(value), "</dd></div>\n");
  return out + "</dl>\n";
}

std::string NotesOf(const Report& report) {
  if (report.notes.empty()) return "";
  std::string out = "<section class=\"notes\"><h2>To be known about these numbers</h2><ul>\n";
  for (const std::string& note : report.notes) out += Element("li", note);
  return out + "</ul></section>\n";
}

std::string MissingOf(const Report& report) {
  std::string items;
  for (const Figure& figure : report.figures)
    if (!figure.missing.empty())
      absl::StrAppend(&items, "<li><strong>", Escaped(figure.title), "</strong>: ", Escaped(figure.missing), "</li>\n");
  if (items.empty()) return "";
  return absl::StrCat("<section class=\"missing\" id=\"missing\"><h2>What is not shown</h2><ul>\n", items,
                      "</ul></section>\n");
}

}  // namespace

std::string HtmlOf(const Report& report) {
  std::string out = absl::StrCat(kHead, Element("title", report.title), "<style>", kStyle,
                                 "</style></head>\n<body><main>", Element("h1", report.title),
                                 Element("p", report.subtitle, "subtitle"), FactsOf(report), NotesOf(report));
  for (size_t i = 0; i < report.figures.size(); ++i)
    if (report.figures[i].missing.empty()) out += SectionOf(report.figures[i], absl::StrCat("figure-", i));
  return absl::StrCat(out, MissingOf(report), Element("footer", report.footer), "</main></body></html>\n");
}

}  // namespace dovetail::report
