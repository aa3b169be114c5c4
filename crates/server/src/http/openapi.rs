//! `GET /openapi.json`: this API as a document, made of the types that requests and answers are. `GET /docs`: a page to read
//! it by. Neither needs the internet, or a key: they tell what everybody may know.
//!
//! What a call is stands in [`calls`], once more beside its route; a test sees to it that none is missing.

use std::sync::LazyLock;

use aenv_api::{
    AliasAnswer, ApiErrorBody, ApiKeyInfo, AssignTags, AssignedTags, Batch, BuildLogs, BuildStatus, ConnectRequest,
    CreatedApiKey, ExecuteRequest, Executed, FilesLink, ForkRequest, ForkResult, Lease, LeaseRenewal, ListedSandbox,
    NetworkUpdate, NewApiKey, NewBatch, NewColdSandbox, NewSandbox, NewSnapshot, Node, PauseRequest, RefreshRequest,
    RemoveTags, RenamedApiKey, ResumeRequest, RollbackRequest, Sandbox, SandboxDetail, SandboxLogs, SandboxLogsV2,
    SandboxMetric, SandboxesWithMetrics, SnapshotInfo, Team, Template, TemplateBuildStartV2, TemplateCreateV3,
    TemplateCreated, TemplateNames, TemplateTag, TemplateUpdate, TemplateWithBuilds, TimeoutRequest, WriteFileRequest,
    WrittenFile,
};
use axum::http::header;
use axum::response::{Html, IntoResponse, Response};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

type MakeSchema = fn(&mut SchemaGenerator) -> Schema;

/// A call, as it is documented.
struct Call {
    method: &'static str,
    path: &'static str,
    tag: &'static str,
    summary: &'static str,
    query: &'static [(&'static str, &'static str)],
    takes: Option<MakeSchema>,
    /// Bytes of a file.
    takes_file: bool,
    status: u16,
    /// Another status with the same answer.
    or_status: Option<u16>,
    answers: Answer,
    is_open: bool,
}

enum Answer {
    Nothing,
    Json(MakeSchema),
    Other(&'static str),
}

fn schema<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = generator.subschema_for::<T>();
    // What is not among the definitions is not made OpenAPI's by itself.
    generator.transforms_mut().for_each(|transform| transform.transform(&mut schema));
    schema
}

impl Call {
    fn new(tag: &'static str, method: &'static str, path: &'static str, summary: &'static str) -> Self {
        Self {
            method,
            path,
            tag,
            summary,
            query: &[],
            takes: None,
            takes_file: false,
            status: 204,
            or_status: None,
            answers: Answer::Nothing,
            is_open: false,
        }
    }

    fn query(self, query: &'static [(&'static str, &'static str)]) -> Self {
        Self { query, ..self }
    }

    fn takes<T: JsonSchema>(self) -> Self {
        Self { takes: Some(schema::<T>), ..self }
    }

    fn takes_file(self) -> Self {
        Self { takes_file: true, ..self }
    }

    fn answers<T: JsonSchema>(self, status: u16) -> Self {
        Self { status, answers: Answer::Json(schema::<T>), ..self }
    }

    fn status(self, status: u16) -> Self {
        Self { status, ..self }
    }

    fn answers_other(self, kind: &'static str) -> Self {
        Self { status: 200, answers: Answer::Other(kind), ..self }
    }

    fn or(self, status: u16) -> Self {
        Self { or_status: Some(status), ..self }
    }

    fn open(self) -> Self {
        Self { is_open: true, ..self }
    }

    fn render(&self, generator: &mut SchemaGenerator) -> Value {
        let mut parameters: Vec<Value> = parameters(self.path)
            .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
            .collect();
        parameters.extend(self.query.iter().map(|(name, description)| {
            json!({"name": name, "in": "query", "description": description, "schema": {"type": "string"}})
        }));
        let mut content = Map::new();
        if let Some(takes) = self.takes {
            content.insert("application/json".to_owned(), json!({"schema": takes(generator)}));
        }
        if self.takes_file {
            let bytes = json!({"schema": {"type": "string", "format": "binary"}});
            content.insert("application/octet-stream".to_owned(), bytes);
        }
        let answer = match self.answers {
            Answer::Nothing => json!({"description": "Done."}),
            Answer::Json(answers) => {
                json!({"description": "Done.", "content": {"application/json": {"schema": answers(generator)}}})
            }
            Answer::Other(kind) => json!({"description": "Done.", "content": {kind: {}}}),
        };
        let mut responses = Map::from_iter(
            [self.status].into_iter().chain(self.or_status).map(|status| (status.to_string(), answer.clone())),
        );
        responses.insert("default".to_owned(), json!({"$ref": "#/components/responses/Refusal"}));
        let mut call = json!({
            "tags": [self.tag],
            "summary": self.summary,
            "parameters": parameters,
            "responses": responses,
        });
        if !content.is_empty() {
            call["requestBody"] = json!({"content": content});
        }
        if self.is_open {
            call["security"] = json!([]);
        }
        call
    }
}

/// Parameters of a path, in order.
fn parameters(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
}

const LIST: &[(&str, &str)] = &[
    ("metadata", "`k=v&k2=v2`, percent-encoded once as a whole and once each part: all must match"),
    ("state", "`running`, `paused`, or both with a comma"),
    ("order", "`asc` or `desc` by start; default `desc`"),
    ("startedAfter", "RFC 3339, inclusive"),
    ("template", "id or name"),
    ("limit", "items of a page, 1 to 100"),
    ("nextToken", "`x-next-token` of the page before"),
];
const LABELS: &[(&str, &str)] = &[LIST[0]];
const PAGE: &[(&str, &str)] = &[LIST[5], LIST[6]];
const SNAPSHOTS: &[(&str, &str)] = &[("sandboxID", "of which sandbox"), ("name", "name or id"), LIST[5], LIST[6]];

/// Every call there is.
#[rustfmt::skip]
fn calls() -> Vec<Call> {
    let sandbox = |method, path, summary| Call::new("sandboxes", method, path, summary);
    let told = |method, path, summary| Call::new("what sandboxes do", method, path, summary);
    let plain = |method, path, summary| Call::new("commands and files", method, path, summary);
    let snapshot = |method, path, summary| Call::new("snapshots", method, path, summary);
    let template = |method, path, summary| Call::new("templates", method, path, summary);
    let node = |method, path, summary| Call::new("node", method, path, summary);
    vec![
        sandbox("post", "/v2/sandboxes", "Create a sandbox, secured; lives 300 s unless told otherwise").takes::<NewSandbox>().answers::<Sandbox>(201),
        sandbox("get", "/v2/sandboxes", "List sandboxes, in pages").query(LIST).answers::<Vec<ListedSandbox>>(200),
        sandbox("post", "/sandboxes", "Create a sandbox, secured on request").takes::<NewSandbox>().answers::<Sandbox>(201),
        sandbox("get", "/sandboxes", "List running sandboxes").query(LABELS).answers::<Vec<ListedSandbox>>(200),
        sandbox("post", "/sandboxes/batch", "Create many alike, perhaps under a lease").takes::<NewBatch>().answers::<Batch>(201),
        sandbox("post", "/leases/{id}/renew", "Renew a lease").takes::<LeaseRenewal>().answers::<Lease>(200),
        sandbox("delete", "/leases/{id}", "End a lease, and the sandboxes under it"),
        sandbox("post", "/sandboxes-cold", "Create a sandbox of an image, without a template").takes::<NewColdSandbox>().answers::<Sandbox>(201),
        sandbox("get", "/sandboxes/{id}", "Tell of a sandbox").answers::<SandboxDetail>(200),
        sandbox("delete", "/sandboxes/{id}", "End a sandbox"),
        sandbox("post", "/sandboxes/{id}/timeout", "Set the end of its time, from now").takes::<TimeoutRequest>(),
        sandbox("post", "/sandboxes/{id}/refreshes", "Have it live longer").takes::<RefreshRequest>(),
        sandbox("post", "/sandboxes/{id}/connect", "Resume it if it is paused, and have it live longer; the time is required").takes::<ConnectRequest>().answers::<Sandbox>(200).or(201),
        sandbox("post", "/v2/sandboxes/{id}/connect", "Resume it if it is paused, and have it live longer").takes::<ConnectRequest>().answers::<Sandbox>(200).or(201),
        sandbox("post", "/sandboxes/{id}/pause", "Pause it").takes::<PauseRequest>(),
        sandbox("post", "/sandboxes/{id}/resume", "Resume it; deprecated, connect does").takes::<ResumeRequest>().answers::<Sandbox>(201),
        sandbox("put", "/sandboxes/{id}/network", "Change what it may reach: all of it, also what is not named").takes::<NetworkUpdate>(),
        sandbox("post", "/sandboxes/{id}/fork", "Copy it into children that run").takes::<ForkRequest>().answers::<Vec<ForkResult>>(201),
        sandbox("post", "/sandboxes/{id}/rollback", "Go back to one of its snapshots, in place").takes::<RollbackRequest>().answers::<Sandbox>(200),
        sandbox("get", "/sandboxes/{id}/custom-extension-params", "What extensions keep of it").answers::<Map<String, Value>>(200),
        sandbox("patch", "/sandboxes/{id}/custom-extension-params", "Change that").takes::<Map<String, Value>>().answers::<Map<String, Value>>(200),
        plain("post", "/sandboxes/{id}/execute", "Run a command and wait for its end").takes::<ExecuteRequest>().answers::<Executed>(200),
        plain("post", "/sandboxes/{id}/files/write", "Write a file: the body, with a path in the query, or what JSON holds").query(&[("path", "where"), ("user", "whose")]).takes::<WriteFileRequest>().takes_file().answers::<WrittenFile>(200),
        plain("get", "/sandboxes/{id}/files/read", "Read a file").query(&[("path", "which; required"), ("user", "as whom")]).answers_other("application/octet-stream"),
        told("get", "/sandboxes/{id}/metrics", "What it used, oldest first").query(&[("start", "Unix seconds"), ("end", "Unix seconds")]).answers::<Vec<SandboxMetric>>(200),
        told("get", "/sandboxes/metrics", "What many use, the newest of each").query(&[("sandbox_ids", "1 to 100 ids with commas")]).answers::<SandboxesWithMetrics>(200),
        told("get", "/sandboxes/{id}/logs", "What it went through, as lines").query(&[("start", "Unix milliseconds"), ("limit", "1 to 1000")]).answers::<SandboxLogs>(200),
        told("get", "/v2/sandboxes/{id}/logs", "What it went through").query(&[("cursor", "Unix milliseconds"), ("direction", "`forward` or `backward`"), ("level", "the least"), ("search", "what the message contains"), ("limit", "1 to 1000")]).answers::<SandboxLogsV2>(200),
        snapshot("post", "/sandboxes/{id}/snapshots", "Take a snapshot of a running sandbox").takes::<NewSnapshot>().answers::<SnapshotInfo>(201),
        snapshot("get", "/snapshots", "List snapshots").query(SNAPSHOTS).answers::<Vec<SnapshotInfo>>(200),
        snapshot("get", "/snapshots/{id}", "Tell of a snapshot, by id or name").answers::<SnapshotInfo>(200),
        node("get", "/api-keys", "List the keys that were made").answers::<Vec<ApiKeyInfo>>(200),
        node("post", "/api-keys", "Make a key; the only time that it is told").takes::<NewApiKey>().answers::<CreatedApiKey>(201),
        node("patch", "/api-keys/{id}", "Rename a key").takes::<RenamedApiKey>().status(200),
        node("delete", "/api-keys/{id}", "Revoke a key"),
        template("post", "/v3/templates", "Announce a build of a template").takes::<TemplateCreateV3>().answers::<TemplateCreated>(202),
        template("get", "/templates", "List templates").answers::<Vec<Template>>(200),
        template("get", "/v2/templates", "List templates, in pages").query(PAGE).answers::<Vec<Template>>(200),
        template("get", "/templates/{id}", "Tell of a template and its builds").answers::<TemplateWithBuilds>(200),
        template("delete", "/templates/{id}", "Delete a template or a snapshot, by id or name"),
        template("patch", "/templates/{id}", "Change it; deprecated").takes::<TemplateUpdate>().answers::<TemplateNames>(200),
        template("patch", "/v2/templates/{id}", "Change it").takes::<TemplateUpdate>().answers::<TemplateNames>(200),
        template("get", "/templates/aliases/{alias}", "Whose a name is").answers::<AliasAnswer>(200),
        template("post", "/templates/tags", "Tag a build").takes::<AssignTags>().answers::<AssignedTags>(201),
        template("delete", "/templates/tags", "Take tags away").takes::<RemoveTags>(),
        template("get", "/templates/{id}/tags", "List the tags of a template").answers::<Vec<TemplateTag>>(200),
        template("get", "/templates/{id}/files/{hash}", "Where to upload the files of a step, and whether they are here").answers::<FilesLink>(201),
        template("put", "/uploads/{hash}", "Upload them, as the link says").takes_file().open(),
        template("post", "/v2/templates/{id}/builds/{build}", "Start a build that was announced").takes::<TemplateBuildStartV2>().answers::<Value>(202),
        template("get", "/templates/{id}/builds/{build}/status", "How far a build is").query(&[("logsOffset", "entries to pass over"), ("limit", "at most 100"), ("level", "the least")]).answers::<BuildStatus>(200),
        template("get", "/templates/{id}/builds/{build}/logs", "What a build said").query(&[("logsOffset", "entries to pass over"), ("limit", "at most 100"), ("level", "the least")]).answers::<BuildLogs>(200),
        node("get", "/nodes", "This node").query(&[("clusterID", "of which cluster")]).answers::<Vec<Node>>(200),
        node("get", "/nodes/{id}", "This node, by its id").answers::<Node>(200),
        node("get", "/teams", "The one team").answers::<Vec<Team>>(200),
        node("get", "/debug/ledger", "What the node's records own beside what is there").answers::<Value>(200),
        node("get", "/health", "Whether it answers").open(),
        node("get", "/metrics", "What it counts, for Prometheus").answers_other("text/plain").open(),
        node("get", "/openapi.json", "This document").answers::<Value>(200).open(),
        node("get", "/docs", "A page of it").answers_other("text/html").open(),
    ]
}

fn document() -> Value {
    let mut generator = SchemaSettings::openapi3().into_generator();
    let mut paths = Map::new();
    for call in calls() {
        let path = paths.entry(call.path).or_insert_with(|| json!({}));
        path[call.method] = call.render(&mut generator);
    }
    let refusal = schema::<ApiErrorBody>(&mut generator);
    let schemas = generator.take_definitions(true);
    json!({
        "openapi": "3.0.3",
        "info": {
            "title": "AgentENV",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Sandboxes as microVMs, by E2B's API and some calls more.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-KEY"}},
            "responses": {"Refusal": {
                "description": "What happened to what.",
                "content": {"application/json": {"schema": refusal}},
            }},
        },
    })
}

/// `GET /openapi.json`.
pub(super) async fn show() -> Response {
    static TEXT: LazyLock<String> = LazyLock::new(|| document().to_string());
    ([(header::CONTENT_TYPE, "application/json")], TEXT.as_str()).into_response()
}

/// `GET /docs`.
pub(super) async fn page() -> Html<&'static str> {
    Html(include_str!("docs.html"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Calls that `mod.rs` routes to a handler, as `METHOD PATH`.
    fn routed() -> BTreeSet<String> {
        let mut routed = BTreeSet::new();
        for route in include_str!("mod.rs").split(".route(").skip(1) {
            let mut parts = route.splitn(3, '"');
            let (Some(_), Some(path), Some(rest)) = (parts.next(), parts.next(), parts.next()) else { continue };
            let handlers = rest.split("\n        .").next().unwrap_or(rest);
            for method in ["get", "post", "put", "patch", "delete"] {
                if handlers.contains(&format!("{method}(")) {
                    routed.insert(format!("{method} {path}"));
                }
            }
        }
        routed
    }

    #[test]
    fn every_call_is_documented_and_every_documented_call_is_there() {
        let documented: BTreeSet<String> =
            calls().iter().map(|call| format!("{} {}", call.method, call.path)).collect();
        assert_eq!(calls().len(), documented.len(), "each once");
        let routed = routed();
        let missing: Vec<_> = routed.difference(&documented).collect();
        assert!(missing.is_empty(), "without a row in `calls`: {missing:?}");
        let gone: Vec<_> = documented.difference(&routed).collect();
        assert!(gone.is_empty(), "rows in `calls` without a route: {gone:?}");
    }

    #[test]
    fn what_the_document_refers_to_is_in_it() {
        let document = document();
        let text = document.to_string();
        for reference in text.split("\"$ref\":\"#").skip(1) {
            let pointer = reference.split('"').next().unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
        let created = &document["paths"]["/v2/sandboxes"]["post"];
        assert_eq!(
            created["responses"]["201"]["content"]["application/json"]["schema"]["$ref"],
            "#/components/schemas/Sandbox"
        );
        let connected = &document["paths"]["/v2/sandboxes/{id}/connect"]["post"]["responses"];
        assert!(connected["200"] == connected["201"] && connected["200"].is_object(), "{connected}");
        let sandbox = &document["components"]["schemas"]["NewSandbox"];
        assert!(sandbox["properties"]["templateID"].is_object() && sandbox["properties"]["autoPause"].is_object());
        assert_eq!(sandbox["required"], json!(["templateID"]));
        assert_eq!(document["paths"]["/sandboxes/{id}"]["get"]["parameters"][0]["name"], "id");
        assert!(!text.contains("\"schema\":true"), "OpenAPI 3.0 has no schemas that are just true");
    }
}
