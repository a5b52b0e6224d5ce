//! baton
fn main() {}
