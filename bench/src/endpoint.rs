//! Where requests go: a URL, taken apart once.

use crate::error::BenchError;

/// An OpenAI-compatible server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub host: String,
    pub port: u16,
    /// Path of the completion route.
    pub path: String,
    /// Path before `/v1`, mostly empty; `/status` and `/metrics` are below it.
    pub root: String,
    pub api_key: Option<String>,
}

impl Endpoint {
    /// Understands `http://host:port`, with or without `/v1`, or the whole path of a completion route.
    ///
    /// # Errors
    /// It is no plain-HTTP URL.
    pub fn parse(url: &str, api_key: Option<String>) -> Result<Self, BenchError> {
        let bad = |reason: &str| BenchError::Url {
            url: url.to_owned(),
            reason: reason.to_owned(),
        };
        let uri: hyper::Uri = url.parse().map_err(|error| BenchError::Url {
            url: url.to_owned(),
            reason: format!("{error}"),
        })?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(bad("TLS is not spoken; give the plain-HTTP address")),
            _ => return Err(bad("it does not begin with http://")),
        }
        let host = uri.host().ok_or_else(|| bad("no host"))?;
        let path = uri.path().trim_end_matches('/');
        let (root, path) = if path.ends_with("/completions") {
            let root = path.split("/v1/").next().unwrap_or_default();
            (root.to_owned(), path.to_owned())
        } else {
            let root = path.strip_suffix("/v1").unwrap_or(path);
            (root.to_owned(), format!("{root}/v1/chat/completions"))
        };
        Ok(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(80),
            path,
            root,
            api_key,
        })
    }

    /// `host:port`, with brackets where the host is an IPv6 address.
    #[must_use]
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Whether prompts go as chat messages.
    #[must_use]
    pub fn is_chat(&self) -> bool {
        self.path.ends_with("/chat/completions")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_as_people_type_them_are_understood() {
        let path = |url: &str| {
            let endpoint = Endpoint::parse(url, None).unwrap();
            (endpoint.authority(), endpoint.path, endpoint.root)
        };
        let plain = (
            "localhost:8080".to_owned(),
            "/v1/chat/completions".to_owned(),
            String::new(),
        );
        assert_eq!(path("http://localhost:8080"), plain);
        assert_eq!(path("http://localhost:8080/v1/"), plain);
        assert_eq!(
            path("http://[::1]/api/v1/completions"),
            (
                "[::1]:80".into(),
                "/api/v1/completions".into(),
                "/api".into()
            )
        );
        assert!(Endpoint::parse("https://localhost", None).is_err());
        assert!(Endpoint::parse("localhost:80", None).is_err());
    }
}
