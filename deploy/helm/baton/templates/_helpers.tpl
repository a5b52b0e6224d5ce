{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough that names of pods and Services built on it stay below 63 characters. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "baton.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "baton.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "baton.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{/* What every pod has. No token: nothing in it speaks to the Kubernetes API. */}}
{{- define "baton.pod" -}}
serviceAccountName: {{ include "baton.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
privileged: false
runAsNonRoot: true
{{- end -}}

{{- define "baton.modelMount" -}}
{{- if ne .Values.model.source "bundled" }}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "baton.modelVolume" -}}
{{- with .Values.model }}
{{- if eq .source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ required "model.pvc.claimName is empty; model.source pvc wants the name of a claim" .pvc.claimName }}
    readOnly: true
{{- else if eq .source "hostPath" }}
- name: model
  hostPath:
    path: {{ required "model.hostPath.path is empty; model.source hostPath wants a directory of the nodes" .hostPath.path }}
    type: Directory
{{- else if eq .source "image" }}
- name: model
  image:
    reference: {{ required "model.image.reference is empty; model.source image wants an image that holds the checkpoint" .image.reference }}
    pullPolicy: {{ .image.pullPolicy }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.telemetryArgs" -}}
- --log-format={{ .Values.telemetry.logFormat }}
{{- with .Values.telemetry.otlpEndpoint }}
- --otlp-endpoint={{ . }}
- --otlp-protocol={{ $.Values.telemetry.otlpProtocol }}
{{- end }}
{{- if ne .Values.telemetry.traceRatio nil }}
- --trace-ratio={{ .Values.telemetry.traceRatio }}
{{- end }}
{{- end -}}
