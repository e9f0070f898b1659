//! What podring's own environment variables say, read one way: space around a value doesn't count, an empty value is none,
//! and one that can't be is an error that names the variable.

use std::ops::RangeInclusive;
use std::time::Duration;

/// An environment variable that says what can't be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={got:?}: expected {expected}")]
pub struct BadSetting {
    /// Its name.
    pub variable: &'static str,
    /// What it should be.
    pub expected: &'static str,
    /// What it is.
    pub got: String,
}

/// Variables, as a function of their names gives them.
pub struct Variables<L>(pub L);

impl<L: Fn(&str) -> Option<String>> Variables<L> {
    /// A variable's text.
    pub fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// A variable that `understood` makes a value of.
    pub fn read<T>(
        &self,
        variable: &'static str,
        expected: &'static str,
        understood: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, BadSetting> {
        let Some(got) = self.text(variable) else { return Ok(None) };
        match understood(&got) {
            Some(value) => Ok(Some(value)),
            None => Err(BadSetting { variable, expected, got }),
        }
    }

    /// One that is on or off.
    pub fn flag(&self, variable: &'static str) -> Result<Option<bool>, BadSetting> {
        self.read(variable, "0 or 1", |text| match text {
            "0" | "false" | "no" | "off" => Some(false),
            "1" | "true" | "yes" | "on" => Some(true),
            _ => None,
        })
    }

    /// A port to listen on, 0 for any, or a range of which the first free one is taken.
    pub fn ports(&self, variable: &'static str) -> Result<Option<RangeInclusive<u16>>, BadSetting> {
        self.read(variable, "a port, 0 to 65535, or a range of ports such as 29600-29631", ports)
    }

    /// PODRING_SILENCE_MS: after how long without a sign of life a peer is lost.
    pub fn silence(&self) -> Result<Option<Duration>, BadSetting> {
        self.read("PODRING_SILENCE_MS", "milliseconds, 100 or more", |text| {
            text.parse().ok().filter(|&ms| ms >= 100).map(Duration::from_millis)
        })
    }
}

/// A port, or a range of them in which 0, which means any, has no place.
fn ports(text: &str) -> Option<RangeInclusive<u16>> {
    let number = |text: &str| text.trim().parse::<u16>().ok();
    match text.split_once('-') {
        None => number(text).map(|port| port..=port),
        Some((first, last)) => {
            let (first, last) = (number(first)?, number(last)?);
            (0 < first && first <= last).then_some(first..=last)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn holding(value: &str) -> Variables<impl Fn(&str) -> Option<String>> {
        Variables(move |name: &str| (name == "V").then(|| value.to_owned()))
    }

    #[test]
    fn empty_is_not_set() {
        for value in ["", "  "] {
            assert_eq!(holding(value).text("V"), None);
            assert_eq!(holding(value).flag("V"), Ok(None));
            assert_eq!(holding(value).ports("V"), Ok(None));
        }
        assert_eq!(holding("1").flag("W"), Ok(None));
        assert_eq!(holding(" a b ").text("V").as_deref(), Some("a b"));
    }

    #[test]
    fn flags() {
        for (value, expected) in [("1", true), (" on ", true), ("0", false), ("false", false)] {
            assert_eq!(holding(value).flag("V"), Ok(Some(expected)), "{value}");
        }
        let error = holding(" maybe").flag("V").unwrap_err();
        assert_eq!(error.to_string(), "V=\"maybe\": expected 0 or 1");
    }

    #[test]
    fn ports_and_ranges() {
        for (value, expected) in [("0", 0..=0), (" 29600 ", 29600..=29600), ("29600 - 29607", 29600..=29607)] {
            assert_eq!(holding(value).ports("V"), Ok(Some(expected)), "{value}");
        }
        for wrong in ["70000", "-1", "5-3", "0-3", "1-", "a", "1-2-3"] {
            assert_eq!(holding(wrong).ports("V").unwrap_err().variable, "V", "{wrong}");
        }
    }

    #[test]
    fn silence_has_a_least_value() {
        let silence = |value: &'static str| Variables(move |_: &str| Some(value.to_owned())).silence();
        assert_eq!(silence("100"), Ok(Some(Duration::from_millis(100))));
        for wrong in ["99", "0", "-1", "1.5", "1s"] {
            assert_eq!(silence(wrong).unwrap_err().variable, "PODRING_SILENCE_MS", "{wrong}");
        }
    }
}
