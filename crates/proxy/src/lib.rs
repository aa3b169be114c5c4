//! Data plane: routes requests to ports inside sandboxes
