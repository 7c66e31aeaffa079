{{- define "lmetric.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "lmetric.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "lmetric.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "lmetric.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "lmetric.selector" -}}
app.kubernetes.io/name: {{ include "lmetric.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lmetric.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "lmetric.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "lmetric.image" -}}
{{- $image := index . 0 }}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ $image.tag | default (index . 1).Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "lmetric.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "lmetric.fullname" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "lmetric.secret" -}}
{{ .Values.secret.name | default (include "lmetric.fullname" .) }}
{{- end }}

{{- define "lmetric.pool" -}}
{{ .Values.inferencePool.name | default (include "lmetric.fullname" .) }}
{{- end }}

{{- define "lmetric.engineNamespace" -}}
{{ .Values.engines.namespace | default .Release.Namespace }}
{{- end }}

{{/* "true" if the routers find engines through the Kubernetes API. */}}
{{- define "lmetric.discovers" -}}
{{- if not .Values.engines.fixed }}true{{ end }}
{{- end }}

{{/* "true" if clients need API keys. */}}
{{- define "lmetric.apiKeys" -}}
{{- if kindIs "invalid" .Values.auth.apiKeys }}{{ if eq .Values.mode "router" }}true{{ end }}
{{- else if .Values.auth.apiKeys }}true{{ end }}
{{- end }}

{{/* "true" if init steps export tokenizers. */}}
{{- define "lmetric.exports" -}}
{{- if and .Values.tokenizers (not .Values.tokenizer.existingClaim) }}true{{ end }}
{{- end }}

{{/* Files of the Secret that the routers need, as `items` of a volume. */}}
{{- define "lmetric.secretItems" -}}
{{- if include "lmetric.apiKeys" . }}
- {key: {{ .Values.secret.apiKeys | quote }}, path: keys.yaml}
{{- end }}
{{- if .Values.exchange.enabled }}
- {key: {{ .Values.secret.replicasToken | quote }}, path: replicas-token}
{{- end }}
{{- if .Values.admin.enabled }}
- {key: {{ .Values.secret.adminToken | quote }}, path: admin-token}
{{- end }}
{{- if .Values.auth.salts }}
- {key: {{ .Values.secret.saltSecret | quote }}, path: salt-secret}
{{- end }}
{{- end }}

{{/* router.yaml: the keys of the chart, overridden by `config`. */}}
{{- define "lmetric.config" -}}
{{- $config := dict "timeouts" (dict "drain_grace" 5) }}
{{- if eq (len .Values.tokenizers) 1 }}
{{- $_ := set $config "tokenizer" (printf "/tokenizers/%s" (first .Values.tokenizers).name) }}
{{- end }}
{{- $auth := dict }}
{{- if include "lmetric.apiKeys" . }}{{ $_ := set $auth "keys_file" "/etc/lmetric-secrets/keys.yaml" }}{{ end }}
{{- if .Values.auth.salts }}{{ $_ := set $auth "salt_secret_file" "/etc/lmetric-secrets/salt-secret" }}{{ end }}
{{- if $auth }}{{ $_ := set $config "auth" $auth }}{{ end }}
{{- if .Values.admin.enabled }}
{{- $_ := set $config "admin" (dict "enabled" true "token_file" "/etc/lmetric-secrets/admin-token") }}
{{- end }}
{{- if .Values.exchange.enabled }}
{{- $url := printf "http://%s-peers:8080" (include "lmetric.fullname" .) }}
{{- $_ := set $config "replicas" (dict "urls" (list $url) "token_file" "/etc/lmetric-secrets/replicas-token") }}
{{- end }}
{{- if .Values.epp.tls.secret }}
{{- $tls := dict "certificate_file" "/etc/lmetric-tls/tls.crt" "key_file" "/etc/lmetric-tls/tls.key" }}
{{- $_ := set $config "epp" (dict "tls" $tls) }}
{{- end }}
{{- if include "lmetric.discovers" . }}
{{- $pods := dict "inference_pool" (include "lmetric.pool" .) }}
{{- if eq .Values.mode "router" }}
{{- $labels := list }}
{{- range $key, $value := .Values.engines.matchLabels }}{{ $labels = append $labels (printf "%s=%s" $key $value) }}{{ end }}
{{- $pods = dict "selector" (join "," $labels) "port" .Values.engines.port }}
{{- end }}
{{- with .Values.engines.namespace }}{{ $_ := set $pods "namespace" . }}{{ end }}
{{- with .Values.engines.modelKey }}{{ $_ := set $pods "model_key" . }}{{ end }}
{{- with .Values.engines.roleKey }}{{ $_ := set $pods "role_key" . }}{{ end }}
{{- $_ := set $config "discovery" (list (dict "kubernetes" $pods)) }}
{{- else }}
{{- $_ := set $config "engines" .Values.engines.fixed }}
{{- end }}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.config)) }}
{{- end }}

{{/* Values that fit the schema but not each other. */}}
{{- define "lmetric.check" -}}
{{- $timeouts := .Values.config.timeouts | default dict }}
{{- $drain := addf (dig "drain_grace" 5 $timeouts) (dig "drain" 30 $timeouts) }}
{{- if le (float64 .Values.terminationGracePeriodSeconds) $drain }}
{{- fail (printf "terminationGracePeriodSeconds is %d, but draining takes %g s (timeouts.drain_grace + timeouts.drain of config): set it above" (int .Values.terminationGracePeriodSeconds) $drain) }}
{{- end }}
{{- if and .Values.engines.fixed .Values.networkPolicy.enabled (not .Values.networkPolicy.extraEgress) }}
{{- fail "engines.fixed is set, but the NetworkPolicy allows no traffic to them: add their addresses to networkPolicy.extraEgress, or set networkPolicy.enabled to false" }}
{{- end }}
{{- if and (eq .Values.mode "epp") .Values.engines.fixed .Values.inferencePool.create }}
{{- fail "engines.fixed is set, but an InferencePool selects pods by labels: set inferencePool.create to false" }}
{{- end }}
{{- if and (eq .Values.mode "epp") .Values.engines.namespace .Values.inferencePool.create }}
{{- if ne .Values.engines.namespace .Release.Namespace }}
{{- fail (printf "engines.namespace is %q, but an InferencePool selects pods of its own namespace %q: install the release there" .Values.engines.namespace .Release.Namespace) }}
{{- end }}
{{- end }}
{{- if and .Values.epp.tls.secret (eq .Values.mode "router") }}
{{- fail "epp.tls.secret is set, but mode is router: set mode to epp, or remove epp.tls.secret" }}
{{- end }}
{{- if and .Values.serviceMonitor.adminToken (not .Values.admin.enabled) }}
{{- fail "serviceMonitor.adminToken is true, but there is no admin token: set admin.enabled to true" }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.enabled is true, but no gateway is named: set httpRoute.parentRefs, for example [{name: my-gateway}]" }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas %d is above autoscaling.maxReplicas %d" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- end }}
{{- end }}

{{- define "lmetric.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
