//! Templates as models bring them, and templates that mean harm.

use std::time::{Duration, Instant};

use proto::to_dispatcher::PromptError;
use proto::to_worker::ChatMessage;

use super::{ChatTemplate, render};
use crate::engine::ChatTemplateSource;

fn template(source: &str) -> ChatTemplateSource {
    ChatTemplateSource {
        source: source.to_owned(),
        bos_token: "<s>".to_owned(),
        eos_token: "</s>".to_owned(),
    }
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        name: None,
    }
}

fn rendered(source: &str, messages: &[ChatMessage]) -> Result<String, PromptError> {
    render(Some(&template(source)), messages, true)
}

const SMOLLM2: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != \
'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + \
'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
{% endif %}";

/// Llama 2's, with its ways: bos and eos, raise_exception, slices, strip, namespaces.
const LLAMA2: &str = "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] \
== 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate \
user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false \
%}{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}{% else %}\
{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + \
'[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + \
content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}";

#[test]
fn the_small_models_template_renders_as_transformers_renders_it() {
    assert_eq!(
        rendered(SMOLLM2, &[message("user", "Hi")]).as_deref(),
        Ok(
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
            Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
    );
    assert_eq!(
        render(
            Some(&template(SMOLLM2)),
            &[message("system", "Be brief.")],
            false
        )
        .as_deref(),
        Ok("<|im_start|>system\nBe brief.<|im_end|>\n")
    );
}

#[test]
fn an_older_template_renders_and_refuses_in_its_own_words() {
    let messages = [
        message("system", "Be brief."),
        message("user", " Hi "),
        message("assistant", "Hello"),
        message("user", "Bye"),
    ];
    assert_eq!(
        rendered(LLAMA2, &messages).as_deref(),
        Ok("<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi [/INST] Hello </s><s>[INST] Bye [/INST]")
    );
    assert_eq!(
        rendered(LLAMA2, &[message("assistant", "me first")]),
        Err(PromptError::Template(
            "Conversation roles must alternate user/assistant/user/assistant/...".to_owned()
        ))
    );
}

#[test]
fn blocks_on_lines_of_their_own_leave_no_line_ends_behind() {
    let source = "{%- for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n    \
                  {% endif %}\n{% endfor %}\n";
    assert_eq!(
        rendered(source, &[message("user", "a")]).as_deref(),
        Ok("U: a\n")
    );
}

#[test]
fn the_helpers_of_transformers_are_there() {
    let one = [message("user", "x")];
    let cases = [
        (
            "{{ {'a': [1, 2.5, none, true], 'é<': \"'\"} | tojson }}",
            r#"{"a": [1, 2.5, null, true], "é<": "'"}"#,
        ),
        (
            "{{ {'a': [1]} | tojson(indent=2) }}",
            "{\n  \"a\": [\n    1\n  ]\n}",
        ),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        (
            "{% generation %}a{% endgeneration %}{%- generation -%} b {%- endgeneration %}",
            "ab",
        ),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "01",
        ),
        (
            "{{ tools is defined }}{{ tools }}|{{ messages[0].name is defined }}",
            "False|False",
        ),
        (
            "{{ messages[0]['content'].upper().split('X')|length }}",
            "2",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "1",
        ),
        (
            "{% macro f(a, b='c') %}{{ a }}{{ b }}{% endmacro %}{{ f('x') }}",
            "xc",
        ),
    ];
    for (source, expected) in cases {
        let got = rendered(source, &one);
        let expected = expected.to_owned();
        assert!(
            got.as_ref()
                .is_ok_and(|g| g.eq_ignore_ascii_case(&expected)),
            "{source}: {got:?}"
        );
    }
}

#[test]
fn a_name_reaches_the_template_where_there_is_one() {
    let mut named = message("tool", "42");
    named.name = Some("calculator".to_owned());
    assert_eq!(
        rendered("{{ messages[0].name }}", &[named]).as_deref(),
        Ok("calculator")
    );
}

#[test]
fn a_model_without_a_template_is_spoken_to_in_chatml() {
    assert_eq!(
        render(None, &[message("user", "Hi")], true).as_deref(),
        Ok("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    );
}

#[test]
fn a_template_that_is_compiled_once_renders_many_times() {
    let compiled = ChatTemplate::new(Some(&template(SMOLLM2))).expect("it is a template");
    for n in 0..50 {
        let text = compiled
            .render(&[message("user", &n.to_string())], true)
            .expect("renders");
        assert!(text.contains(&format!("user\n{n}<|im_end|>")));
    }
}

#[test]
fn what_is_no_template_or_gives_nothing_is_an_error() {
    let one = [message("user", "x")];
    assert!(matches!(
        rendered("{% if %}", &one),
        Err(PromptError::Template(_))
    ));
    assert!(matches!(
        rendered("{{ nothing.at.all }}", &one),
        Err(PromptError::Template(_))
    ));
    assert!(matches!(
        rendered("{% include 'other' %}", &one),
        Err(PromptError::Template(_))
    ));
    assert_eq!(rendered("", &one), Err(PromptError::Empty));
}

#[test]
fn a_hostile_template_ends_in_an_error_soon_and_in_bounded_memory() {
    let hostile = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{{ 'x' * 99999999 * 99999999 }}",
        "{{ 'x' * 100000000 }}{{ 'x' * 100000000 }}{{ 'x' * 100000000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(999999999999)|list }}",
        "{{ '%999999999d'|format(1) }}{{ 'a'.replace('', 'x' * 1000000).replace('', 'x' * 1000000) }}",
        "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% for b in range(99) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}{{ ns.x|tojson }}",
    ];
    for source in hostile {
        let begun = Instant::now();
        let outcome = rendered(source, &[message("user", "x")]);
        assert!(matches!(outcome, Err(PromptError::Template(_))), "{source}");
        // The prompt thread's own bound is 2 s; this leaves a slow machine ten times that.
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{source}: {:?}",
            begun.elapsed()
        );
    }
}

#[test]
fn a_deeply_nested_value_does_not_end_the_process() {
    for show in [
        "{{ ns.x|tojson }}",
        "{{ ns.x }}",
        "{{ ns.x|string|length }}",
    ] {
        let source = format!(
            "{{% set ns = namespace(x=[]) %}}{{% for a in range(300) %}}{{% for b in range(300) %}}\
             {{% set ns.x = [ns.x] %}}{{% endfor %}}{{% endfor %}}{show}"
        );
        let outcome = rendered(&source, &[message("user", "x")]);
        assert_eq!(outcome.is_err(), show.contains("tojson"), "{show}");
    }
}
