{{- define "prefix-gateway.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{/* 50 characters leave room for suffixes within the 63 of a DNS label. */}}
{{- define "prefix-gateway.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "prefix-gateway.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "prefix-gateway.selectorLabels" -}}
app.kubernetes.io/name: {{ include "prefix-gateway.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "prefix-gateway.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "prefix-gateway.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "prefix-gateway.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "prefix-gateway.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "prefix-gateway.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The gateway's configuration file. Numbers go through toYaml: helm holds them as floats, and prints 33554432 as 3.3554432e+07. */}}
{{- define "prefix-gateway.config" -}}
{{- $seen := dict -}}
{{- range $at, $replica := .Values.config.replicas -}}
{{- if hasKey $seen $replica.id -}}
{{- fail (printf "config.replicas[%d].id: %q is used twice" $at $replica.id) -}}
{{- end -}}
{{- $_ := set $seen $replica.id true -}}
{{- end -}}
{{- $config := deepCopy .Values.config -}}
{{- if not $config.telemetry.otlp_endpoint -}}
{{- $_ := unset $config.telemetry "otlp_endpoint" -}}
{{- end -}}
{{- if .Values.agentTls.existingSecret -}}
{{- $files := dict "ca_file" "/etc/agent-tls/ca.crt" "cert_file" "/etc/agent-tls/tls.crt" "key_file" "/etc/agent-tls/tls.key" -}}
{{- $_ := set $config "tls" (merge $files (pick $config.tls "server_name")) -}}
{{- end -}}
{{- $_ := set $config "listen" (dict "host" "0.0.0.0" "port" 8000 "admin_host" "0.0.0.0" "admin_port" 8001) -}}
{{- toYaml $config -}}
{{- end }}
