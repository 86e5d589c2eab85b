//! What a load reports, and how it fails.

use std::cell::RefCell;
use std::fs;
use std::rc::Rc;

use worker::engine::llama::load;
use worker::engine::{LoadError, LoadOptions, TextModel};

use crate::stream::{engine, model, options};

fn quiet(options: &LoadOptions) -> Result<(), LoadError> {
    load(options, Box::new(|_| {})).map(|_| ())
}

#[test]
fn real_model_a_load_reports_progress_limits_and_identity() {
    let told = Rc::new(RefCell::new(Vec::new()));
    let into = Rc::clone(&told);
    let loaded = load(
        &options(3, 384),
        Box::new(move |n| into.borrow_mut().push(n)),
    );
    let loaded = loaded.expect("the model loads");
    let told = told.borrow();
    assert_eq!(told.last(), Some(&1000));
    assert!(told.is_sorted());
    let limits = loaded.engine.limits();
    assert_eq!(
        (limits.slots, limits.context_tokens, limits.vocabulary),
        (3, 384, 49_152)
    );
    assert_eq!(limits.device, "CPU (1 thread)");
    // 66.4 MB of Q4_1, and the embedding of 30.1 MB in Q8_0, which is the head as well.
    assert_eq!(limits.weight_bytes_per_step, 96_576_768);
    assert_eq!(limits.kv_bytes_per_token, 23_040);
    assert_eq!(loaded.identity.name, "SmolLM2-135M-Instruct.Q4_1");
    let again = load(&options(1, 256), Box::new(|_| {})).expect("it loads again");
    assert_eq!(again.identity, loaded.identity);
    let named = LoadOptions {
        name: Some("small".to_owned()),
        ..options(1, 0)
    };
    let named = load(&named, Box::new(|_| {})).expect("it loads");
    assert_eq!(named.identity.name, "small");
    assert_eq!(
        named.engine.limits().context_tokens,
        8192,
        "0 is what it was trained on"
    );
}

#[test]
fn real_model_a_file_that_can_never_load_says_why() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| LoadOptions {
        model: folder.path().join(name),
        ..options(1, 256)
    };
    let whole = fs::read(model()).expect("read");

    fs::write(folder.path().join("cut.gguf"), &whole[..40 << 20]).expect("written");
    fs::write(folder.path().join("text.gguf"), "once upon a time").expect("written");
    let mut other = whole;
    let name = other
        .windows(5)
        .position(|w| w == b"llama")
        .expect("the architecture");
    other[name..name + 5].copy_from_slice(b"zebra");
    fs::write(folder.path().join("zebra.gguf"), other).expect("written");

    for (file, words) in [
        ("none.gguf", "No such file"),
        ("text.gguf", "not a GGUF file"),
        ("cut.gguf", "is cut short"),
        ("zebra.gguf", "unknown model architecture: 'zebra'"),
    ] {
        match quiet(&at(file)) {
            Err(LoadError::Permanent(said)) => assert!(said.contains(words), "{file}: {said}"),
            other => panic!("{file}: {other:?}"),
        }
    }
    for bad in [
        LoadOptions {
            slots: 0,
            ..options(1, 256)
        },
        LoadOptions {
            slots: 257,
            ..options(1, 256)
        },
        LoadOptions {
            threads: 0,
            ..options(1, 256)
        },
        LoadOptions {
            slots: 256,
            context_tokens: u32::MAX,
            ..options(1, 256)
        },
    ] {
        assert!(
            matches!(quiet(&bad), Err(LoadError::Permanent(_))),
            "{bad:?}"
        );
    }
}

#[test]
fn real_model_ids_and_bytes_are_each_others_inverse() {
    let (_engine, text) = engine(1, 256);
    for words in [
        "Hello, world!",
        " two  spaces\n\n\ttab",
        "naïve café 東京 🦊👩‍👩‍👧",
        "a\0b",
        "",
    ] {
        let ids = text.tokenise(words, true);
        let mut bytes = Vec::new();
        for &id in &ids {
            text.piece(id, &mut bytes);
        }
        assert_eq!(String::from_utf8_lossy(&bytes), words);
    }
    // A fox is several tokens, none of which is a character.
    let fox = text.tokenise("🦊", false);
    assert!(fox.len() > 1);
    let mut bytes = Vec::new();
    text.piece(fox[0], &mut bytes);
    assert!(std::str::from_utf8(&bytes).is_err());
}

#[test]
fn real_model_special_tokens_are_recognised_silent_and_end_streams() {
    let (_engine, text) = engine(1, 256);
    let ids = text.tokenise("<|im_start|>user\nHi<|im_end|>", true);
    assert_eq!((ids[0], ids[ids.len() - 1]), (1, 2));
    let mut bytes = Vec::new();
    text.piece(1, &mut bytes);
    text.piece(2, &mut bytes);
    text.piece(u32::MAX, &mut bytes);
    assert!(bytes.is_empty(), "special tokens have no bytes");
    let ends: Vec<u32> = (0..text.vocabulary()).filter(|&t| text.is_end(t)).collect();
    assert!(ends.contains(&2) && ends.contains(&0), "{ends:?}");
    assert!(!text.is_end(u32::MAX));
    assert!(text.longest_token_bytes() >= 13 && text.longest_token_bytes() < 1000);
    let template = text.chat_template().expect("it brings one");
    assert!(template.source.contains("im_start"));
    assert_eq!(
        (template.bos_token.as_str(), template.eos_token.as_str()),
        ("<|im_start|>", "<|im_end|>")
    );
}
