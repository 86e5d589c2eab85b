//! Which services are installed here, for whoever looks at the installation.

use std::path::PathBuf;

use super::Manager;
use super::control::Control;
use super::intent::Owner;
use super::report::{argument, origin_word};
use super::stamp::Origin;

/// An installed service.
#[derive(Clone, Debug)]
pub struct Installed {
    pub definition: PathBuf,
    /// What is wrong with its definition.
    pub trouble: Option<String>,
    /// The manager's word.
    pub state: String,
    /// Who it runs as.
    pub uid: u32,
    pub gid: u32,
    /// What its definition names: the program, the configuration.
    pub programs: Vec<PathBuf>,
}

/// Your own service and the machine's, where they are.
#[must_use]
pub fn installed() -> Vec<Installed> {
    [false, true].into_iter().filter_map(look).collect()
}

fn look(system: bool) -> Option<Installed> {
    let manager = Manager::native();
    let mut owner = Owner::find(manager, system, None).ok()?;
    let (text, origin) = owner.possible().first()?.found().ok()??;
    if system && let Some(user) = user(&text) {
        owner = Owner::find(manager, true, Some(&user)).ok()?;
    }
    let control = Control { owner: &owner };
    let state = control
        .standing()
        .map_or_else(|error| error.to_string(), |standing| standing.word);
    let config = argument(&text, "--config");
    let trouble = match origin {
        Origin::Ours => None,
        other => Some(origin_word(&other).to_owned()),
    };
    Some(Installed {
        definition: owner.definition(),
        trouble,
        state,
        uid: owner.uid,
        gid: owner.gid,
        programs: config.into_iter().collect(),
    })
}

/// Whom a definition has the service run as.
fn user(definition: &str) -> Option<String> {
    if let Ok(plist) = plist::Value::from_reader_xml(definition.as_bytes()) {
        let name = plist.as_dictionary()?.get("UserName")?.as_string()?;
        return Some(name.to_owned());
    }
    let line = definition
        .lines()
        .find_map(|line| line.strip_prefix("User="))?;
    Some(line.replace("%%", "%"))
}

#[cfg(test)]
mod tests {
    use super::super::spec::Scope;
    use super::super::spec::examples::{awkward, ordinary};
    use super::super::{launchd, systemd};
    use super::*;

    #[test]
    fn the_user_of_a_definition_is_read_back_from_it() {
        let spec = awkward(Scope::System);
        assert_eq!(user(&systemd::service(&spec)), spec.user);
        assert_eq!(user(&launchd::definition(&spec).unwrap()), spec.user);
        assert_eq!(user(&systemd::service(&ordinary(Scope::User))), None);
    }
}
