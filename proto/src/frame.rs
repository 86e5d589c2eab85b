//! Length-prefixed framing over byte slices: push bytes, pull frames, one size cap.
