//! Process groups over the engines.
