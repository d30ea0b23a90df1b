dovetail_test(chat_template_test
       chat_template_source_test.cc
  DEPS dovetail_chat_template)
