//! Control-plane wire types and client
