//! How a message looks: one line, whatever is in it.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// `2026-01-31T12:00:00.000000Z podring[rank 3] WARN rendezvous: message field=value`
pub(crate) struct Line(pub(crate) fn() -> Option<u32>);

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = String::new();
        ctx.format_fields(Writer::new(&mut fields), event)?;
        SystemTime.format_time(&mut writer)?;
        writer.write_str(" podring")?;
        if let Some(rank) = self.0() {
            write!(writer, "[rank {rank}]")?;
        }
        write!(writer, " {} {}: ", event.metadata().level(), short(event.metadata().target()))?;
        for character in fields.chars() {
            if character.is_control() {
                // Of others' making: names of hosts, a plugin's errors.
                write!(writer, "{}", character.escape_default())?;
            } else {
                writer.write_char(character)?;
            }
        }
        writer.write_char('\n')
    }
}

/// `podring_fabric::hub::failing` is `fabric`.
fn short(target: &str) -> &str {
    let own = target.strip_prefix("podring::").or_else(|| target.strip_prefix("podring_")).unwrap_or(target);
    own.split("::").next().unwrap_or(own)
}
