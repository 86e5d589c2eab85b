//! Folders that cannot be served: each a permanent error that says what is wrong with which file.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use worker::engine::LoadError;
use worker::engine::mlx::Unpacking;

use super::plain::{case, load, turn};

/// A copy of a good folder, spoilt; the words that its load ends with.
fn told(name: &str, spoil: impl FnOnce(&Path)) -> String {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(case(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    spoil(copy.path());
    match load(copy.path(), Unpacking::Never) {
        Err(LoadError::Permanent(words)) => words,
        Err(LoadError::Transient(words)) => panic!("called transient: {words}"),
        Ok(_) => panic!("the folder was loaded"),
    }
}

fn edit(folder: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = folder.join(file);
    let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

#[test]
fn a_good_folder_loads() {
    let _turn = turn();
    load(&case("llama-untied-4bit"), Unpacking::Never).unwrap();
}

#[test]
fn shapes_that_do_not_fit_the_configuration_name_the_tensor() {
    let _turn = turn();
    let set = |key: &'static str, value: Value| {
        told("llama-tied", move |f| {
            edit(f, "config.json", |c| c[key] = value)
        })
    };
    assert!(set("intermediate_size", json!(512)).contains("mlp.gate_proj.weight has the shape"));
    assert!(set("num_key_value_heads", json!(4)).contains("self_attn.k_proj.weight has the shape"));
    assert!(set("num_hidden_layers", json!(4)).contains("model.layers.3"));
    assert!(set("num_hidden_layers", json!(2)).contains("model.layers.2"));
    assert!(set("tie_word_embeddings", json!(false)).contains("lm_head.weight is missing"));
    assert!(
        set("quantization", json!({"bits": 4, "group_size": 64})).contains("model.embed_tokens")
    );
    let words = told("llama-untied-4bit", |f| {
        edit(f, "config.json", |c| {
            c["quantization"]["group_size"] = json!(32)
        });
    });
    assert!(words.contains("scales has the shape"), "{words}");
}

#[test]
fn a_model_of_another_kind_is_refused_by_its_name() {
    let _turn = turn();
    let words = told("llama-tied", |f| {
        edit(f, "config.json", |c| c["model_type"] = json!("gemma3"));
    });
    assert!(words.contains("gemma3"), "{words}");
}

#[test]
fn a_missing_and_a_truncated_shard_are_named() {
    let _turn = turn();
    let shard = "model-00002-of-00002.safetensors";
    let words = told("llama-untied-4bit", |f| {
        fs::remove_file(f.join(shard)).unwrap()
    });
    assert!(words.contains(shard), "{words}");
    let size = fs::metadata(case("llama-untied-4bit").join(shard))
        .unwrap()
        .len();
    for kept in [0, 7, 100, size / 2, size - 1] {
        let words = told("llama-untied-4bit", |f| {
            let file = fs::OpenOptions::new()
                .write(true)
                .open(f.join(shard))
                .unwrap();
            file.set_len(kept).unwrap();
        });
        assert!(words.contains(shard), "{words}");
    }
    let words = told("llama-tied", |f| {
        fs::remove_file(f.join("model.safetensors")).unwrap()
    });
    assert!(words.contains("model.safetensors is missing"), "{words}");
}

#[test]
fn a_missing_or_foreign_text_file_is_named() {
    let _turn = turn();
    for file in ["tokenizer.json", "config.json"] {
        let words = told("llama-tied", |f| fs::remove_file(f.join(file)).unwrap());
        assert!(words.contains(file), "{words}");
        for text in ["", "{", "[]", "{\"model\": 1}"] {
            let words = told("llama-tied", |f| fs::write(f.join(file), text).unwrap());
            assert!(words.contains(file), "{words}");
        }
    }
    for file in ["tokenizer_config.json", "generation_config.json"] {
        let words = told("llama-tied", |f| fs::write(f.join(file), "{").unwrap());
        assert!(words.contains(file), "{words}");
    }
    let words = told("llama-tied", |f| {
        edit(f, "tokenizer.json", |t| {
            t["model"]["vocab"]["long"] = json!(5000)
        });
    });
    assert!(words.contains("5000"), "{words}");
}

#[test]
fn a_template_that_is_none_is_refused_at_the_load() {
    let _turn = turn();
    for source in [
        "{% for m in messages %}",
        "{{ 1 +",
        "{% include 'x' %}{% if %}",
    ] {
        let words = told("llama-tied", |f| {
            fs::write(f.join("chat_template.jinja"), source).unwrap();
        });
        assert!(words.contains("chat template"), "{words}");
    }
    let words = told("llama-tied", |f| {
        fs::write(f.join("chat_template.jinja"), "x".repeat((1 << 20) + 1)).unwrap();
    });
    assert!(words.contains("larger than"), "{words}");
}

#[test]
fn what_is_no_folder_is_told_what_would_be() {
    let _turn = turn();
    let file = tempfile::NamedTempFile::new().unwrap();
    let words = load(file.path(), Unpacking::Never).unwrap_err().to_string();
    assert!(words.contains("config.json and safetensors"), "{words}");
}
