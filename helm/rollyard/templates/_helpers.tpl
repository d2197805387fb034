{{/* Name of all objects: the release's, with "rollyard" in it. */}}
{{- define "rollyard.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains "rollyard" .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-rollyard" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "rollyard.instance" -}}
{{- .Values.instance | default .Release.Name }}
{{- end }}

{{/* Labels by which pods of a component are selected: (dict "root" $ "component" "api"). */}}
{{- define "rollyard.selectorLabels" -}}
app.kubernetes.io/name: rollyard
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Without the chart's version: an upgrade restarts only the pods that it changes. */}}
{{- define "rollyard.podLabels" -}}
{{ include "rollyard.selectorLabels" . }}
app.kubernetes.io/part-of: rollyard
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "rollyard.labels" -}}
{{ include "rollyard.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: rollyard
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Whole name of an image: (dict "root" $ "given" .Values.images.api "name" "api"). */}}
{{- define "rollyard.image" -}}
{{- $images := .root.Values.images }}
{{- .given | default (printf "%s%s:%s" $images.prefix .name ($images.tag | default .root.Chart.AppVersion)) }}
{{- end }}

{{- define "rollyard.apiServiceAccount" -}}
{{- $account := .Values.api.serviceAccount }}
{{- $account.name | default (ternary (printf "%s-api" (include "rollyard.fullname" .)) "default" $account.create) }}
{{- end }}

{{- define "rollyard.operatorServiceAccount" -}}
{{- $account := .Values.operator.serviceAccount }}
{{- $account.name | default (ternary (printf "%s-operator" (include "rollyard.fullname" .)) "default" $account.create) }}
{{- end }}

{{- define "rollyard.tokensSecret" -}}
{{- .Values.tokens.existingSecret | default (printf "%s-tokens" (include "rollyard.fullname" .)) }}
{{- end }}

{{- define "rollyard.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "rollyard.fullname" .)) }}
{{- end }}

{{/* "true" where there is a CA certificate to hand on. */}}
{{- define "rollyard.hasCA" -}}
{{- if and .Values.tls.enabled (or (not .Values.tls.existingSecret) .Values.tls.hasCA) }}true{{ end }}
{{- end }}

{{- define "rollyard.scheme" -}}
{{- ternary "https" "http" .Values.tls.enabled }}
{{- end }}

{{/* The control plane's DNS name. */}}
{{- define "rollyard.apiHost" -}}
{{- printf "%s-api.%s.svc.%s" (include "rollyard.fullname" .) .Release.Namespace .Values.clusterDomain }}
{{- end }}

{{- define "rollyard.apiUrl" -}}
{{- printf "%s://%s:%v" (include "rollyard.scheme" .) (include "rollyard.apiHost" .) .Values.api.service.port }}
{{- end }}

{{- define "rollyard.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* nodeSelector, tolerations, affinity, spread, scheduler and priorityClassName of a component's values. */}}
{{- define "rollyard.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* What no schema can say; a release that breaks it is refused with the field. */}}
{{- define "rollyard.check" -}}
{{- $api := .Values.api }}
{{- if gt (int $api.replicas) 1 }}
{{- if not $api.database.existingSecret }}
{{- fail "api.replicas: more than one needs PostgreSQL: set api.database.existingSecret (SQLite has one writer)" }}
{{- end }}
{{- if not $api.trajectories.url }}
{{- fail "api.replicas: more than one needs a trajectory store that all of them reach: set api.trajectories.url" }}
{{- end }}
{{- end }}
{{- if and (eq $api.persistence.type "existingClaim") (not $api.persistence.existingClaim) }}
{{- fail "api.persistence.existingClaim: required with api.persistence.type=existingClaim" }}
{{- end }}
{{- if and (eq $api.persistence.type "hostPath") (not $api.persistence.hostPath) }}
{{- fail "api.persistence.hostPath: required with api.persistence.type=hostPath" }}
{{- end }}
{{- $prorl := $api.prorl }}
{{- if $prorl.enabled }}
{{- if not $prorl.config.tokenizer }}
{{- fail "api.prorl.config.tokenizer: required with api.prorl.enabled: a folder with tokenizer.json that stage workers see" }}
{{- end }}
{{- if eq (int $prorl.port) 8765 }}
{{- fail "api.prorl.port: 8765 is the control plane's own port" }}
{{- end }}
{{- if not (include "rollyard.isLoopback" $prorl.listen) }}
{{- if not .Values.networkPolicy.enabled }}
{{- fail "api.prorl.listen: these calls need no token, so another address than loopback needs networkPolicy.enabled, and api.prorl.from" }}
{{- end }}
{{- else if $prorl.from }}
{{- fail "api.prorl.from: has no effect while api.prorl.listen is a loopback address" }}
{{- end }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.host: required with ingress.enabled" }}
{{- end }}
{{- if and .Values.sandboxes.isolation.external (not .Values.sandboxes.isolation.required) }}
{{- fail "sandboxes.isolation.external: have no effect with sandboxes.isolation.required=false" }}
{{- end }}
{{- if and .Values.sandboxes.isolation.checks (not .Values.sandboxes.isolation.required) }}
{{- fail "sandboxes.isolation.checks: have no effect with sandboxes.isolation.required=false" }}
{{- end }}
{{- end }}

{{/* "yes" for a loopback address, else nothing. */}}
{{- define "rollyard.isLoopback" -}}
{{- if or (hasPrefix "127." .) (eq . "::1") (eq . "localhost") }}yes{{ end }}
{{- end }}

{{/* The DNS names of the control plane's Service, as a JSON list. */}}
{{- define "rollyard.serviceNames" -}}
{{- $name := printf "%s-api" (include "rollyard.fullname" .) }}
{{- $full := printf "%s.%s" $name .Release.Namespace }}
{{- list $name $full (printf "%s.svc" $full) (printf "%s.svc.%s" $full .Values.clusterDomain) | toJson }}
{{- end }}

{{/* The path below which browsers find the page: api.pathPrefix, or else the path of the ingress, unless that is a
pattern or leads to some calls only. */}}
{{- define "rollyard.pathPrefix" -}}
{{- $prefix := .Values.api.pathPrefix }}
{{- if and (not $prefix) .Values.ingress.enabled }}
{{- $path := trimSuffix "/" .Values.ingress.path }}
{{- $isPath := regexMatch "^(/[A-Za-z0-9_~][A-Za-z0-9._~-]*)+$" $path }}
{{- $isOwn := regexMatch "^/(assets|docs|healthz|jobs|metrics|openapi[.]json|readyz|v1)(/|$)" $path }}
{{- $prefix = ternary $path "" (and $isPath (not $isOwn)) }}
{{- end }}
{{- $prefix }}
{{- end }}

{{/* The settings of the ProRL calls. Clients address the Service by its names, which are added. */}}
{{- define "rollyard.prorlConfig" -}}
{{- $config := deepCopy .Values.api.prorl.config }}
{{- if not (include "rollyard.isLoopback" .Values.api.prorl.listen) }}
{{- $names := include "rollyard.serviceNames" . | fromJsonArray }}
{{- $_ := set $config "hosts" (concat $names ($config.hosts | default list) | uniq) }}
{{- end }}
{{- toYaml $config }}
{{- end }}
