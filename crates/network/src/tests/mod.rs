//! Whole slots on the real kernel. They need root; without it they say so and pass.

mod egress;
mod slots;
mod world;
