//! Who wrote a definition: a comment in it with version and checksum, so that an edit, or another's file, is never overwritten unasked.

/// What a definition's stamp begins with.
const MARK: &str = "dispatcher-service:";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What is known of a definition that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Written by `service install` of this version or an older one, and not changed since.
    Ours,
    /// By a newer version.
    Newer(String),
    /// By us, and changed since.
    Edited,
    /// By somebody else.
    Foreign,
}

/// How a comment is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syntax {
    Xml,
    Unit,
}

/// `text` with its stamp.
#[must_use]
pub fn seal(text: &str, syntax: Syntax) -> String {
    let words = format!("{MARK} {VERSION} {}", checksum(text));
    match syntax {
        Syntax::Unit => format!("# {words}\n{text}"),
        // The XML declaration must stay the first line.
        Syntax::Xml => {
            let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
            format!("{first}\n<!-- {words} -->\n{rest}")
        }
    }
}

/// Where `sealed` comes from.
#[must_use]
pub fn origin(sealed: &str) -> Origin {
    let Some(line) = sealed.lines().take(3).find(|line| line.contains(MARK)) else {
        return Origin::Foreign;
    };
    let mut words = line.split_whitespace().skip_while(|word| *word != MARK);
    let (Some(version), Some(sum)) = (words.nth(1), words.next()) else {
        return Origin::Foreign;
    };
    if numbers(version) > numbers(VERSION) {
        return Origin::Newer(version.to_owned());
    }
    let text = sealed.replacen(&format!("{line}\n"), "", 1);
    if checksum(&text) == sum {
        Origin::Ours
    } else {
        Origin::Edited
    }
}

fn checksum(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
}

fn numbers(version: &str) -> Vec<u64> {
    let parts = version.split(['.', '-', '+']);
    parts.map_while(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLIST: &str = "<?xml version=\"1.0\"?>\n<plist/>\n";

    #[test]
    fn what_was_sealed_is_ours_until_it_is_changed() {
        for (text, syntax) in [("[Unit]\nA=b\n", Syntax::Unit), (PLIST, Syntax::Xml)] {
            let sealed = seal(text, syntax);
            assert_eq!(origin(&sealed), Origin::Ours, "{sealed}");
            assert_eq!(origin(&format!("{sealed}\n")), Origin::Edited);
            assert_eq!(origin(text), Origin::Foreign);
            let newer = sealed.replace(VERSION, "99.0.0");
            assert_eq!(origin(&newer), Origin::Newer("99.0.0".to_owned()));
            let older = sealed.replace(VERSION, "0.0.9");
            assert_eq!(origin(&older), Origin::Ours);
        }
        assert!(seal(PLIST, Syntax::Xml).starts_with("<?xml"));
    }

    #[test]
    fn a_stamp_that_is_cut_is_nobodys() {
        assert_eq!(origin("# dispatcher-service:\n"), Origin::Foreign);
        assert_eq!(origin(""), Origin::Foreign);
    }
}
