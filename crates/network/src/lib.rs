//! Network slots: netns, veth, tap, and connections into them
