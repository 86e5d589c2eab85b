//! Two arms, run in turn: is one faster?

use super::rows::load_words;
use crate::arrival::Arrival;
use crate::cell::Measured;
use crate::mark::marks;
use crate::record::Recorded;
use crate::target::Size;
use crate::verdict;

/// What two cells must have in common to be compared.
pub type Key = (Option<Size>, Arrival);

/// Size and load.
#[must_use]
pub fn key(measured: &Measured) -> Key {
    (measured.cell.size, measured.cell.arrival)
}

/// The warm cells of an arm, of a size and load, by repeat; those that are marked are left out.
#[must_use]
pub fn sound<'a>(cells: &'a [Measured], arm: Option<&str>, only: Key) -> Vec<&'a Measured> {
    let wanted = |one: &&Measured| {
        !one.cell.cold && arm.is_none_or(|arm| one.cell.arm == arm) && key(one) == only
    };
    let mut mine: Vec<&Measured> = cells
        .iter()
        .filter(wanted)
        .filter(|one| marks(one).is_empty())
        .collect();
    mine.sort_by_key(|one| one.cell.repeat);
    mine
}

/// Each size and load that both have, once.
#[must_use]
pub fn common(a: &[Measured], b: &[Measured]) -> Vec<Key> {
    let mut keys: Vec<Key> = Vec::new();
    for key in a.iter().filter(|one| !one.cell.cold).map(key) {
        let is_common = b
            .iter()
            .any(|other| !other.cell.cold && self::key(other) == key);
        if is_common && !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys
}

/// A heading for a key, in words.
#[must_use]
pub fn key_words((size, load): &Key) -> String {
    let size = size.map_or_else(String::new, |size| {
        format!("{} instances × {} slots, ", size.instances, size.slots)
    });
    format!("{size}{}", load_words(load))
}

/// The verdict tables of a run of two arms; nothing where there are not two.
#[must_use]
pub fn of_run(recorded: &Recorded) -> String {
    let mut names: Vec<&String> = recorded.run.arms.keys().collect();
    names.sort();
    let [a, b] = names[..] else {
        return String::new();
    };
    let of = |name: &str| -> Vec<Measured> {
        let mine = recorded.cells.iter().filter(|one| one.cell.arm == name);
        mine.cloned().collect()
    };
    let mut text = String::new();
    for key in common(&of(a), &of(b)) {
        let mut mine = sound(&recorded.cells, Some(a), key);
        let mut theirs = sound(&recorded.cells, Some(b), key);
        // Pairs stay pairs: where one of them is marked, the other goes too.
        let repeats =
            |cells: &[&Measured]| -> Vec<u32> { cells.iter().map(|one| one.cell.repeat).collect() };
        let (of_a, of_b) = (repeats(&mine), repeats(&theirs));
        mine.retain(|one| of_b.contains(&one.cell.repeat));
        theirs.retain(|one| of_a.contains(&one.cell.repeat));
        let compared = verdict::compare(&mine, &theirs, true, recorded.run.seed);
        text += &format!("\n{}:\n\n", key_words(&key));
        text += &verdict::markdown(a, b, &compared);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::rows::made;
    use super::*;
    use crate::strain::Strain;

    #[test]
    fn a_marked_run_takes_its_partner_with_it() {
        let mut cells = Vec::new();
        for repeat in 0..6 {
            cells.push(made::cell("a", None, 4, repeat, 100.0));
            cells.push(made::cell("b", None, 4, repeat, 150.0));
        }
        cells[3].strain = Some(Strain {
            heat_events: Some(1),
            ..Strain::default()
        });
        assert_eq!(sound(&cells, Some("b"), key(&cells[0])).len(), 5);
        let mut recorded = crate::record::made(cells);
        recorded.run.arms = [("a", "x"), ("b", "y")]
            .map(|(name, place)| (name.to_owned(), place.to_owned()))
            .into();
        let text = of_run(&recorded);
        assert!(text.contains("concurrency 4:"), "{text}");
        let line = text
            .lines()
            .find(|line| line.contains("aggregate"))
            .unwrap();
        assert!(
            line.contains("1.500") && line.ends_with("| better |"),
            "{text}"
        );
        recorded.cells.truncate(8);
        assert!(of_run(&recorded).contains("too few runs (3 < 5)"));
    }
}
