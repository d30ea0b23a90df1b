#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <limits>
#include <thread>

#include "model/chat_template/chat_template.h"

// Templates are untrusted: each of these would run for ever, or eat all memory, in an engine without limits.

namespace dovetail::model {
namespace {

using ::testing::HasSubstr;

#if defined(__SANITIZE_ADDRESS__) || defined(DOVETAIL_TSAN)
constexpr double kSlowBuild = 20;
#else
constexpr double kSlowBuild = 1;
#endif

double CpuMs() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

absl::Status Refusal(const std::string& source, const RenderInputs& inputs = {}, const TemplateLimits& limits = {}) {
  constexpr int kTries = 5;  // a machine may be slow for a moment, even in processor time
  constexpr double kLimitMs = 100 * kSlowBuild;
  absl::Status status;
  double fastest_ms = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kTries && fastest_ms >= kLimitMs; ++i) {
    const double before = CpuMs();
    const auto parsed = ChatTemplate::Parse(source, limits);
    status = parsed.ok() ? parsed->Render(inputs).status() : parsed.status();
    fastest_ms = std::min(fastest_ms, CpuMs() - before);
  }
  EXPECT_LT(fastest_ms, kLimitMs) << source.substr(0, 200);
  return status;
}

std::string Repeat(const std::string& text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

TEST(TemplateLimits, LoopsWithinLoopsRunOutOfStepsAndTheErrorNamesTheLine) {
  const auto status = Refusal("first line\n{% for a in range(2000) %}\n{{ a }}{{ a }}{% endfor %}");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("chat template line 3: the template ran for more than its 10200 steps"));
}

TEST(TemplateLimits, EveryEvilTemplateIsRefusedWithinATenthOfASecond) {
  const std::string nested_list =
      "{% set ns = namespace(x=[]) %}{% for i in range(900) %}{% set ns.x = [ns.x] %}{% endfor %}";
  const std::string doubling =
      "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
  const std::string cases[] = {
      "{% for x in range(10**9) %}{% endfor %}",
      "{{ range(10**18) | list }}",
      "{{ range(-9223372036854775807, 9223372036854775807) }}",
      "{{ 'a' * 10**9 }}",
      "{{ 'a' * 10**18 }}",
      "{{ [0] * 10**9 }}",
      "{{ ([0] * 100000) * 100000 }}",
      "{% set ns = namespace(s='aaaa') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
      "{% set ns = namespace(s='aaaa') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s ~ ns.s %}{% endfor %}",
      "{% set ns = namespace(s='aa') %}{% for i in range(64) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
      "{% set ns = namespace(s='aa') %}{% for i in range(64) %}{% set ns.s = ns.s | replace('', 'xx') %}{% endfor %}",
      "{% set ns = namespace(s='aa') %}{% for i in range(64) %}{% set ns.s = ns.s.join([ns.s, ns.s, ns.s]) %}{% endfor "
      "%}",
      "{% set ns = namespace(s='aa') %}{% for i in range(64) %}{% set ns.s = '%s%s%s' % (ns.s, ns.s, ns.s) %}{% endfor "
      "%}",
      "{% set ns = namespace(s='aa') %}{% for i in range(64) %}{% set ns.s = '{0}{0}{0}'.format(ns.s) %}{% endfor %}",
      "{% set ns = namespace(s='\\\\') %}{% for i in range(64) %}{% set ns.s = ns.s | tojson %}{% endfor %}",
      "{% set ns = namespace(s='\\\\') %}{% for i in range(64) %}{% set ns.s = [ns.s] | string %}{% endfor %}",
      "{% set ns = namespace(s='&') %}{% for i in range(64) %}{% set ns.s = ns.s + (ns.s | e | string) %}{% endfor %}",
      "{{ '%999999999d' % 1 }}",
      "{{ '{:>999999999}'.format(1) }}",
      "{{ '%.999999999f' % 1 }}",
      "{{ 'a'.center(10**12) }}",
      "{{ 'a' | center(10**12) }}",
      "{{ 'a'.zfill(10**12) }}",
      "{{ 'a\\nb' | indent(10**12) }}",
      "{{ strftime_now('%999999999d') }}",
      "{{ strftime_now('%E999999999S') }}",
      "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
      "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{{ a() }}{% endmacro %}{{ a() }}",
      "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(30) }}",
      "{% macro m() %}{{ caller() }}{% endmacro %}{% macro r() %}{% call m() %}{{ r() }}{% endcall %}{% endmacro %}{{ "
      "r() }}",
      nested_list + "{{ ns.x }}",
      nested_list + "{{ ns.x | tojson }}",
      nested_list + "{{ ns.x == ns.x }}",
      doubling + "{{ ns.x }}",
      doubling + "{{ ns.x | tojson }}",
      doubling + "{{ ns.x == ns.x }}",
      "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}",
      "{% for a in range(10000) | sort %}{% for b in range(10000) | sort(reverse=true) %}{% endfor %}{% endfor %}",
      "{% for i in range(9000) %}{% for c in 'aaaaaaaaaaaaaaaaaaaaaaaa' %}{{ c }}{% endfor %}{% endfor %}",
      "{% set s = 'a' * 300000 %}{% for i in range(5000) %}{% if (s + 'b') in s %}{% endif %}{% endfor %}",
      "{% set s = 'a' * 300000 %}{% for i in range(5000) %}{% set x = s.rfind('b' ~ s) %}{% endfor %}",
      "{% set s = 'a' * 300000 %}{% for i in range(5000) %}{% set x = s.strip(s) %}{% endfor %}",
      "{% set s = 'a' * 300000 %}{% for i in range(5000) %}{% set x = s[::2] %}{% endfor %}",
      "{% set s = 'a' * 300000 %}{% for i in range(5000) %}{% set x = s[-1] %}{% endfor %}",
      "{% set s = 'a' * 300000 %}{% for i in range(5000) %}{% set x = s | length %}{% endfor %}",
      "{% set s = 'a' * 300000 %}{% for i in range(5000) %}{% set x = s | title %}{% endfor %}",
      "{% set s = 'a ' * 100000 %}{% for i in range(5000) %}{% set x = s.rsplit(none, 100000) %}{% endfor %}",
      "{% set s = 'a' * 300000 %}{% for i in range(5000) %}{% set x = s.isalpha() %}{% endfor %}",
      "{% set s = 'a' * 300000 %}{% set d = {s: 1} %}{% for i in range(5000) %}{% set x = d[s] %}{% endfor %}",
      "{% set l = range(9000) | list %}{% for i in l %}{% if i in l %}{% endif %}{% endfor %}",
      "{% set l = range(9000) | list %}{% for i in l %}{% set x = l[1:] %}{% endfor %}",
      "{% set d = dict() %}{% for i in range(9000) %}{% set d = dict(d, **{i | string: 1}) %}{% endfor %}{{ d }}",
      "{{ '[' * 100000 | from_json }}",
      "{{ ('[' * 100000) | from_json }}",
      "{{ ('[' * 200 ~ ']' * 200) | from_json }}",
  };
  for (const std::string& source : cases) {
    SCOPED_TRACE(source);
    const auto status = Refusal(source);
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("chat template line 1: "));
  }
}

TEST(TemplateLimits, NothingThatLoadsAnotherTemplateIsUnderstood) {
  for (const char* source : {"{% include 'x' %}", "{% import 'x' as y %}", "{% from 'x' import y %}",
                             "{% extends 'x' %}", "{% block b %}{% endblock %}"}) {
    const auto status = Refusal(std::string("\n\n") + source);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << source;
    EXPECT_THAT(std::string(status.message()), HasSubstr("chat template line 3: ")) << source;
    EXPECT_THAT(std::string(status.message()), HasSubstr("not supported")) << source;
  }
}

TEST(TemplateLimits, DeeplyNestedSourceIsRefusedByTheParser) {
  const int n = 20'000;
  for (const std::string& source :
       {"{{ " + Repeat("(", n) + "1" + Repeat(")", n) + " }}", "{{ " + Repeat("[", n) + Repeat("]", n) + " }}",
        "{{ " + Repeat("not ", n) + "1 }}", "{{ " + Repeat("-", n) + "1 }}", "{{ " + Repeat("+ ", n) + "1 }}",
        Repeat("{% if 1 %}", n) + Repeat("{% endif %}", n), Repeat("{% for x in y %}", n),
        "{{ a" + Repeat(".a", n) + " }}", "{{ a" + Repeat("()", n) + " }}", "{{ a" + Repeat("|e", n) + " }}",
        "{{ " + Repeat("{1:", n) + " }}", "{{ a" + Repeat(" if 1 else a", n) + " }}",
        "{{ a" + Repeat(" if 1", n) + " }}", "{{ " + Repeat("a[", n) + " }}",
        "{% set " + Repeat("(", n) + "a" + Repeat(")", n) + " = 1 %}", "{% set x" + Repeat("|e", n) + " %}{% endset %}",
        "{{ " + Repeat("1 is eq ", n) + " }}"}) {
    EXPECT_FALSE(Refusal(source).ok()) << source.substr(0, 40);
  }
}

TEST(TemplateLimits, ALongFlatExpressionIsNotNesting) {
  const auto parsed = ChatTemplate::Parse("{{ 0" + Repeat(" + 1", 2'000) + " }}{{ 'a'" + Repeat(" ~ 'a'", 100) + " }}");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const auto prompt = parsed->Render({});
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_EQ(prompt->Text(), "2000" + Repeat("a", 101));
}

TEST(TemplateLimits, ATooLongOrBrokenSourceIsRefused) {
  EXPECT_EQ(Refusal(std::string(256 * 1024 + 1, 'x')).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Refusal("\xff\xfe").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Refusal(std::string("{{ \0 }}", 7)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Refusal("{{ 99999999999999999999 }}").code(), absl::StatusCode::kInvalidArgument);
}

RenderInputs Conversation(size_t messages, size_t bytes_each) {
  RenderInputs inputs;
  for (size_t i = 0; i < messages; ++i) {
    inputs.messages.push_back({{"role", i % 2 ? "assistant" : "user"}, {"content", std::string(bytes_each, 'a')}});
  }
  return inputs;
}

TEST(TemplateLimits, EvenWithTheLargestBudgetAnEvilTemplateStopsInTime) {
  const RenderInputs inputs = Conversation(1'000, 4'000);
  for (const char* source : {
           "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
           "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = {'a': [b, a], 'b': 'c'} %}{% endfor %}{% "
           "endfor %}",
           "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = 'a,b,c,d'.split(',') | map('upper') | "
           "join %}{% endfor %}{% endfor %}",
           "{% for a in messages %}{% for b in messages %}{% set x = b.content | upper %}{% endfor %}{% endfor %}",
           "{% for a in messages %}{% for b in messages %}{% set x = b | tojson %}{% endfor %}{% endfor %}",
           "{% for a in messages %}{% for b in messages %}{% set x = b.content | list %}{% endfor %}{% endfor %}",
           "{% for a in messages %}{% for b in messages %}{% set x = b.content.replace('a', 'b') %}{% endfor %}{% "
           "endfor %}",
           "{% for a in messages %}{% for b in messages %}{% set x = b.content.strip('bcdea') %}{% endfor %}{% endfor "
           "%}",
           "{% for a in messages %}{% for b in messages %}{% if b.content == a.content %}{% endif %}{% endfor %}{% "
           "endfor %}",
           "{% macro m(x) %}{{ x }}{% endmacro %}{% for a in range(99999) %}{% for b in range(99999) %}{{ m(b) }}{% "
           "endfor %}{% endfor %}",
           "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a ~ b ~ 1.5 %}{% endfor %}{% endfor %}",
       }) {
    EXPECT_EQ(Refusal(source, inputs).code(), absl::StatusCode::kResourceExhausted) << source;
  }
}

TEST(TemplateLimits, ALongConversationHasRoomForAnHonestTemplate) {
  const auto parsed = ChatTemplate::Parse(
      "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content | trim }}{% else %}<a>{{ "
      "m.content.split('x')[-1].strip() }}"
      "{% endif %}{% if not loop.last and loop.nextitem.role == m.role %}!{% endif %}</t>\n{% endfor %}");
  for (const auto& [messages, bytes] : {std::pair<size_t, size_t>{1, 4'000'000}, {2'000, 2'000}, {20, 100}}) {
    const auto prompt = parsed->Render(Conversation(messages, bytes));
    ASSERT_TRUE(prompt.ok()) << prompt.status();
    EXPECT_EQ(prompt->Text().size(), messages * (bytes + 8));
  }
}

TEST(TemplateLimits, DeepJsonInTheConversationIsRefused) {
  RenderInputs inputs;
  nlohmann::ordered_json deep = 1;
  for (int i = 0; i < 200; ++i) deep = nlohmann::ordered_json::array({deep});
  inputs.tools = deep;
  EXPECT_EQ(Refusal("{{ tools }}", inputs).code(), absl::StatusCode::kResourceExhausted);
}

TEST(TemplateErrors, ARaisedExceptionIsTheTemplatesOwnText) {
  const auto status = Refusal("{{ raise_exception('Conversation roles must alternate') }}");
  EXPECT_EQ(status, absl::InvalidArgumentError("Conversation roles must alternate"));
}

TEST(TemplateErrors, NameTheLineAndWhatWasWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"\n{{ x.y }}", "chat template line 2: 'x' is undefined"},
      {"\n\n{{ messages.z.y }}", "chat template line 3: 'list object' has no attribute 'z'"},
      {"{{ [].append(1) }}", "chat template line 1: access to attribute 'append' of 'list' object is unsafe"},
      {"{{ 1\n | nope }}", "chat template line 2: No filter named 'nope'"},
      {"{% if 1 %}\n{{ 2 ", "chat template line 2: a tag is not closed before the end of the template"},
      {"{% for x in y %}\n", "chat template line 1: expected 'endfor', got the end of the template"},
      {"{% set ns = 1 %}\n{% set ns.x = 2 %}",
       "chat template line 2: cannot assign attribute on non-namespace object 'ns'"},
      {"{{ 'a' + 1 }}", "chat template line 1: can only concatenate str (not \"int\") to str"},
      {"{% macro m() %}\n\n{{ 1 / 0 }}{% endmacro %}{{ m() }}", "chat template line 3: division by zero"},
  };
  for (const auto& [source, message] : cases) EXPECT_EQ(std::string(Refusal(source).message()), message);
}

TEST(TemplateLimits, ListsGrowOnlyWhereTheSandboxIsLoosened) {
  TemplateLimits limits;
  limits.allow_list_mutation = true;
  const auto parsed = ChatTemplate::Parse(
      "{% set l = [2] %}{% set _ = l.append(3) %}{% set _ = l.insert(0, 1) %}{% set _ = l.extend([4]) %}{{ l }}",
      limits);
  const auto prompt = parsed->Render({});
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_EQ(prompt->Text(), "[1, 2, 3, 4]");
  EXPECT_FALSE(Refusal("{% set l = [] %}{% set _ = l.append(l) %}{{ l }}", {}, limits).ok());
  EXPECT_FALSE(
      Refusal("{% set l = [1] %}{% for i in range(64) %}{% set _ = l.extend(l) %}{% endfor %}", {}, limits).ok());
}

TEST(ChatTemplateThreads, OneTemplateRendersInManyThreadsAtOnce) {
  const auto parsed = ChatTemplate::Parse(
      "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}{{ ns.n "
      "}}");
  ASSERT_TRUE(parsed.ok());
  std::vector<std::thread> threads;
  std::vector<std::string> texts(4);
  for (size_t i = 0; i < texts.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) texts[i] = parsed->Render(Conversation(20, 10))->Text();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const std::string& text : texts) EXPECT_EQ(text, std::string(200, 'a') + "20");
}

}  // namespace
}  // namespace dovetail::model
