//! Rules of programs for studies: ThunderAgent's, and the core's own with changes.
mod altered;
mod thunder;

pub use altered::Altered;
pub use thunder::Thunder;

use lmetric_core::CoreError;
use lmetric_core::program::{ProgramConfig, ProgramMode};
use lmetric_core::settings::SettingsReader;

/// The kind of ThunderAgent's rules.
pub const THUNDER: &str = "thunder_agent";

/// Returns the settings of this kind: [`THUNDER`], or one of the core's, which then has the
/// settings of [`Altered`], too. `None` for `"none"`.
///
/// # Errors
/// `BadValue` for another kind, or for a setting of the wrong type or out of its range.
pub fn named(kind: &str, settings: &mut SettingsReader) -> Result<Option<ProgramConfig>, CoreError> {
    if kind == THUNDER {
        let thunder: Thunder = settings.read()?;
        return thunder.rule(settings.read()?).map(Some);
    }
    if kind != "none" && ProgramMode::NAMES.iter().all(|(name, _)| *name != kind) {
        return Err(CoreError::BadValue {
            what: "programs".into(),
            got: format!("{kind:?}"),
            expected: "\"none\", \"observe\", \"auto\", \"admit\" or \"thunder_agent\"".into(),
        });
    }
    let Some(config) = ProgramConfig::named(kind, settings)? else { return Ok(None) };
    settings.read::<Altered>()?.rule(config).map(Some)
}
